"""The command line: one subcommand a module, heavy imports inside the commands."""
