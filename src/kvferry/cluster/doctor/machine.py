"""What this machine allows: limits, ports, the host that would be advertised, and how GPUs and NICs are wired.

Functions that judge take what was read as an argument; those named ``this_...`` read it.
"""

import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.cluster.ports import is_free
from kvferry.protocol.authentication import SECRET_VARIABLE, is_private

RDMA_DEVICES = Path("/sys/class/infiniband")
SHARED_MEMORY = Path("/dev/shm")
SHM_TOO_SMALL, SHM_SMALL = 128 << 20, 2 << 30
USUAL_PORTS = {8000: "vllm serve", 8080: "kvferry up and kvferry gateway"}
QUERY_S = 20.0
NEAR = ("PIX", "PXB", "PHB")
"""Links of `nvidia-smi topo` that do not leave the NUMA node: one or several PCIe bridges, or a host bridge."""
DISTANCE = (*NEAR, "NODE", "SYS")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_NIC_NAME = re.compile(r"^\s*(NIC\d+): (\S+)", re.MULTILINE)
ELSEWHERE = ("8.8.8.8", "2001:4860:4860::8888")
"""Those that vLLM asks the system the way to; asking sends nothing."""


def size(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def locked_memory(limit: int, rdma: bool) -> Finding:
    """`limit` in bytes; RDMA locks every registered page, and a KV cache is registered whole."""
    if limit == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    if not rdma:
        return ok("locked memory", f"{size(limit)}; without an RDMA device nothing has to be locked")
    fix = "ulimit -l unlimited; LimitMEMLOCK=infinity (systemd); --ulimit memlock=-1 (docker)"
    return problem("locked memory", f"{size(limit)}, and RDMA locks the whole KV cache", fix)


def this_locked_memory() -> Finding:
    return locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], bool(rdma_devices()))


def rdma_devices(directory: Path = RDMA_DEVICES) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def shared_memory(total: int, free: int) -> Finding:
    """Bytes of /dev/shm, where the processes of an engine, and UCX, pass messages on."""
    text = f"{size(free)} of {size(total)} free in {SHARED_MEMORY}"
    fix = "--ipc=host or --shm-size=16g (docker); an emptyDir with medium: Memory (Kubernetes)"
    if total < SHM_TOO_SMALL:
        return problem("shared memory", f"{text}: engines with several workers do not start", fix)
    if free < SHM_SMALL:
        return warning("shared memory", text, f"{fix}; or remove what is left over there")
    return ok("shared memory", text)


def this_shared_memory() -> Finding:
    room = os.statvfs(SHARED_MEMORY)
    return shared_memory(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize)


def ports(taken: Mapping[int, str], ephemeral: tuple[int, int]) -> Finding:
    """`taken` are those of ``USUAL_PORTS`` that somebody listens on."""
    drawn = f"the others are drawn by the system from {ephemeral[0]} to {ephemeral[1]}"
    if not taken:
        return ok("ports", f"{', '.join(map(str, USUAL_PORTS))} are free; {drawn}")
    who = ", ".join(f"{port} ({name})" for port, name in taken.items())
    return warning("ports", f"taken: {who}; {drawn}", "name another --port, or end what listens there")


def this_ports() -> Finding:
    taken = {port: name for port, name in USUAL_PORTS.items() if not is_free(port, "0.0.0.0")}
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return ports(taken, (int(low), int(high)))


def route_address() -> str | None:
    """The address that the default route starts from, which vLLM takes where VLLM_HOST_IP is not set."""
    for address in ELSEWHERE:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 80))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def is_own(host: str) -> bool:
    """Whether a listener could be bound to it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def advertised_host(chosen: str, route: str | None, own: bool, secret: bool) -> Finding:
    """`chosen` is VLLM_HOST_IP, `own` whether the host can be bound here, `secret` whether peers are authenticated."""
    name, host = "advertised host", chosen or route
    if not host:  # what vLLM does then
        return warning(
            name,
            "0.0.0.0, since there is no default route: nobody can connect to it",
            "export VLLM_HOST_IP=<this host's address>",
        )
    source = "VLLM_HOST_IP" if chosen else "the default route"
    text = f"{host}, from {source}"
    if not own:
        return problem(name, f"{text}, is no address of this machine", "export VLLM_HOST_IP=<this host's address>")
    if host == "localhost" or host.startswith("127.") or host == "::1":
        fix = "nothing, if all instances run here; else export VLLM_HOST_IP=<an address that the others reach>"
        return warning(name, f"{text}: other hosts cannot reach it", fix)
    if not secret and not is_private(host):
        return warning(name, f"{text}: not private, so peers without a secret refuse it", f"set {SECRET_VARIABLE}")
    return ok(name, text)


def this_advertised_host(environment: Mapping[str, str] = os.environ) -> Finding:
    chosen = environment.get("VLLM_HOST_IP", "")
    route = None if chosen else route_address()
    return advertised_host(chosen, route, is_own(chosen or route or "0.0.0.0"), SECRET_VARIABLE in environment)


def default_host(environment: Mapping[str, str] = os.environ) -> str:
    """What to serve a link on: the host that would be advertised, else the loopback one."""
    return environment.get("VLLM_HOST_IP") or route_address() or "127.0.0.1"


def nearest_nics(topology: str) -> dict[str, tuple[str, str] | None]:
    """Of each GPU, the nearest NIC and the kind of link to it, from the table that ``nvidia-smi topo -m`` prints."""
    lines = [line for line in _COLOUR.sub("", topology).splitlines() if line.strip()]
    header = next((line for line in lines if "GPU0" in line), "")
    names = dict(_NIC_NAME.findall(topology))
    # Cells of the header that have two words ("CPU Affinity") are set apart by tabs; so are all others.
    columns = [cell.strip() for cell in header.split("\t")]
    nearest: dict[str, tuple[str, str] | None] = {}
    for line in lines[lines.index(header) + 1 :] if header else []:
        cells = [cell.strip() for cell in line.split("\t")]
        if re.fullmatch(r"GPU\d+", cells[0]):
            links = [
                pair for pair in zip(columns[1:], cells[1:], strict=False) if re.fullmatch(r"NIC\d+|mlx\S+", pair[0])
            ]
            known = [(nic, link) for nic, link in links if link in DISTANCE]
            best = min(known, key=lambda pair: DISTANCE.index(pair[1]), default=None)
            nearest[cells[0]] = best and (names.get(best[0], best[0]), best[1])
    return nearest


def affinity(topology: str | None) -> list[Finding]:
    """One line per kind of wiring; `topology` is what ``nvidia-smi topo -m`` prints, None without a GPU."""
    name = "GPU/NIC affinity"
    if topology is None:
        return [ok(name, "no GPU")]
    nearest = nearest_nics(topology)
    if not nearest:
        fix = "look at `nvidia-smi topo -m` by hand"
        return [warning(name, "nvidia-smi shows no table of GPUs and NICs", fix)]
    without = [gpu for gpu, nic in nearest.items() if nic is None]
    far = {gpu: nic for gpu, nic in nearest.items() if nic and nic[1] not in NEAR}
    near = {gpu: nic for gpu, nic in nearest.items() if nic and nic[1] in NEAR}
    found = []
    if without:
        text = f"{', '.join(without)}: no RDMA NIC is visible"
        fix = "pass /dev/infiniband into the container; without RDMA, expect the speed of TCP between hosts"
        found.append(warning(name, text, fix))
    if far:
        fix = "use GPUs near a NIC (CUDA_VISIBLE_DEVICES), or move the NIC to the other socket"
        found.append(warning(name, f"{_wiring(far)}: the path crosses the processor", fix))
    if near:
        found.append(ok(name, _wiring(near)))
    return found


def _wiring(links: Mapping[str, tuple[str, str] | None]) -> str:
    return ", ".join(f"{gpu}-{nic[0]} {nic[1]}" for gpu, nic in links.items() if nic)


def this_affinity() -> list[Finding]:
    if shutil.which("nvidia-smi") is None:
        return affinity(None)
    command = ["nvidia-smi", "topo", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=False)
    if done.returncode and "no devices" in (done.stdout + done.stderr).lower():
        return affinity(None)
    return affinity(done.stdout)
