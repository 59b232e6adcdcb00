"""`moespeq doctor`: this machine, a test generation, and a running server or recorded run, looked over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moespeq.doctor import Finding

__all__ = ["command"]


def command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="What the test generation uses; by default the packaged demo model."),
    ] = None,
    *,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="A running `moespeq serve`, such as http://host:8000.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="Output of `run --json`, or a trace of `trace record`.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="MOESPEQ_API_KEY", help="The key that the server asks for.")
    ] = None,
    watch: Annotated[
        float, typer.Option("--watch", min=0.0, metavar="S", help="Seconds between two looks at the server.")
    ] = 5.0,
    device: options.Device = "auto",
    device_memory: options.DeviceMemory = None,
    json: options.Json = False,
) -> None:
    """Look for what is wrong or slow; exit code 1 where there are warnings, 2 where there are problems.

    With --server or --run there is a test generation only where MODEL is given.

    Example: moespeq doctor --server http://127.0.0.1:8000
    """
    from moespeq.cli.console import print_json, start_torch
    from moespeq.cli.refusals import refuse_at_once
    from moespeq.errors import UsageError

    if server is not None and run is not None:
        raise UsageError("--server and --run are two things to look at; give one of them.")
    refuse_at_once(None, {"device": device, "device_memory": device_memory})
    from moespeq.cli.doctor_text import print_report
    from moespeq.doctor import exit_code_of, verdict_of

    sections: dict[str, list[Finding]] = {}
    if server is not None:
        sections[f"server {server}"] = list(_server(server, api_key, watch, model))
    if run is not None:
        sections[f"run {run}"] = list(_run(run, model))
    if server is None or _is_local(server) or model is not None:
        start_torch()
    if server is None or _is_local(server):
        sections = {"this machine": list(_machine(model, device)), **sections}
    if model is not None or (server is None and run is None):
        sections["test generation"] = list(_self_test(model, {"device": device, "device_memory": device_memory}))
    findings = [finding for section in sections.values() for finding in section]
    if json:
        told = {name: [finding.to_json() for finding in section] for name, section in sections.items()}
        print_json({"sections": told, "verdict": verdict_of(findings), "exit_code": exit_code_of(findings)})
    else:
        print_report(sections, verdict_of(findings))
    raise typer.Exit(exit_code_of(findings))


def _machine(model: str | None, device: str) -> Iterator[Finding]:
    from moespeq.cache_folder import cache_folder
    from moespeq.cli.console import err
    from moespeq.doctor.gpu_checks import check_gpu
    from moespeq.doctor.gpu_probe import probe_gpu
    from moespeq.doctor.machine import GpuFacts
    from moespeq.doctor.machine_checks import check_disk, check_host, check_packages
    from moespeq.doctor.machine_probe import probe_disk, probe_host, probe_packages
    from moespeq.prepare import is_store

    store = Path(model) if model is not None and is_store(Path(model)) else None
    with err.status("looking at this machine"):
        host = probe_host()
        gpu = GpuFacts("--device cpu was asked for.") if device == "cpu" else probe_gpu()
        disk = probe_disk(store or cache_folder(), None if store is None else store / "experts.bin")
    yield check_packages(probe_packages())
    yield from check_host(host)
    yield from check_disk(disk)
    yield from check_gpu(gpu, host)


def _server(url: str, api_key: str | None, watch_s: float, model: str | None) -> Iterator[Finding]:
    from dataclasses import replace

    import httpx

    from moespeq.cli.console import err
    from moespeq.demo.assets import read_questions
    from moespeq.doctor.decoding_checks import check_decoding
    from moespeq.doctor.server_probe import watch_server
    from moespeq.doctor.traffic_checks import check_traffic
    from moespeq.errors import UsageError

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        client = httpx.Client(base_url=url, headers=headers)
    except httpx.InvalidURL as error:
        raise UsageError(
            f"'{url}' is no address of a server ({error}); write it like http://127.0.0.1:8000."
        ) from error
    with client, err.status(f"watching {url}"):
        watched = watch_server(client, prompt=read_questions(1)[0].prompt, watch_s=watch_s)
    signals = watched.signals if model is None else replace(watched.signals, model=model)
    yield watched.health
    yield from check_decoding(signals)
    yield from check_traffic(signals, _profile_rate(signals.device, signals.record_bytes) if _is_local(url) else None)


def _run(path: Path, model: str | None) -> Iterator[Finding]:
    from moespeq.doctor.decoding_checks import check_decoding
    from moespeq.doctor.run_probe import read_run
    from moespeq.doctor.traffic_checks import check_traffic

    signals = read_run(path, model)
    yield from check_decoding(signals)
    yield from check_traffic(signals, _profile_rate(signals.device, signals.record_bytes))


def _self_test(model: str | None, load_options: dict[str, Any]) -> Iterator[Finding]:
    from shlex import quote

    from moespeq.cli.console import progress_bar
    from moespeq.demo.assets import MODEL_FOLDER, read_questions
    from moespeq.doctor.findings import problem
    from moespeq.doctor.self_test import OPTIONS, run_self_test
    from moespeq.doctor.self_test_checks import check_self_test
    from moespeq.errors import BudgetError, MoespeqError

    command = quote(model or str(MODEL_FOLDER))
    try:
        with progress_bar() as bar:
            test = run_self_test(model or MODEL_FOLDER, read_questions(1)[0].prompt, progress=bar, **load_options)
    except BudgetError as error:
        told = str(error).rpartition("; ")[0]  # what to do comes after, in options that doctor does not have
        given = {name: value for name, value in (load_options | OPTIONS).items() if value is not None}
        asked = " ".join(f"--{name.replace('_', '-')} {quote(str(value))}" for name, value in given.items())
        cause = f"a test generation with {OPTIONS['k']} drafts does not fit, in a context of {OPTIONS['ctx_size']}"
        yield problem("self-test", told, cause, f"more --device-memory: moespeq plan {command} {asked}")
    except MoespeqError as error:
        yield problem("self-test", str(error), "the model cannot be loaded here", f"moespeq plan {command}")
    else:
        yield from check_self_test(test, command)


def _is_local(url: str) -> bool:
    from moespeq.doctor.server_probe import is_local

    return is_local(url)


def _profile_rate(device: str | None, record_bytes: float | None) -> float | None:
    """What `moespeq profile` measured of the link here, for copies of this size; the disk where the device is a CPU."""
    from moespeq.plan.profile import MachineProfile, default_profile_path

    profile = MachineProfile.load(default_profile_path())
    if profile is None or device is None:
        return None
    if device == "cpu":
        return profile.disk_bytes_per_s
    return (
        profile.link_bytes_per_s(int(record_bytes)) if record_bytes else max(profile.pinned_copy.values(), default=None)
    )
