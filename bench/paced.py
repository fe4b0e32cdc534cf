"""Processes over a paced link of their own: a network namespace whose `lo` lets so many bits a second through."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

INSIDE = "CONVGEN_BENCH_NAMESPACE"
BURST = "80kb"  # hardly more than a packet of lo: else the link saves up while ranks compute


def enter() -> None:
    """Go on in a namespace of its own; outside of one this process starts itself again there, and ends."""
    if INSIDE not in os.environ:
        if shutil.which("unshare") is None or shutil.which("tc") is None:
            sys.exit("a link to pace needs unshare and tc (iproute2)")
        inside = ["unshare", "-rn", sys.executable, *sys.argv]
        sys.exit(subprocess.run(inside, env=os.environ | {INSIDE: "1"}, check=False).returncode)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def pace(rate: str) -> None:
    """Let the link have this rate (as tc writes it); none: no pacing."""
    if rate == "none":
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
        return
    tbf = ["tbf", "rate", rate, "burst", BURST, "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", *tbf], check=True)
