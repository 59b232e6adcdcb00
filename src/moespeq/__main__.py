"""`python -m moespeq`."""

from moespeq.cli.main import run

if __name__ == "__main__":
    run()
