"""What a network plugin that enforces NetworkPolicy does, for the Pods of one namespace.

Debian's plugins connect Pods and enforce nothing, and those that do cannot be built from what a
cluster of tests is built of. This filters packets for real, but knows only policies like ours:
without rules, so that a Pod has no connections in or out.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cluster_of_tests import ask
from kubernetes_of_tests import Boxes

BRIDGED = "/proc/sys/net/bridge/bridge-nf-call-iptables"  # packets between Pods of a node, too
DIRECTIONS = {"Egress": "-s", "Ingress": "-d"}
STEP = 0.05


@contextlib.contextmanager
def enforced(boxes: Boxes, directions: Sequence[str] = tuple(DIRECTIONS)) -> Iterator[None]:
    """Enforce the policies of a namespace, in these directions, for the length of a `with`."""
    over = threading.Event()
    failures: list[Exception] = []

    def follow() -> None:
        rules: list[str] = []
        while not over.wait(STEP):
            try:
                if (wanted := _rules(boxes, directions)) != rules:
                    rules = wanted
                    _inside(boxes, ["iptables-restore", "--noflush"], _table(boxes, rules))
            except Exception as exc:
                failures.append(exc)
                return

    jump = ["FORWARD", "-j", _chain(boxes)]
    _inside(boxes, ["sh", "-c", f"echo 1 > {BRIDGED}"])
    _inside(boxes, ["iptables-restore", "--noflush"], _table(boxes, []))
    _inside(boxes, ["iptables", "-I", *jump])
    following = threading.Thread(target=follow)
    following.start()
    try:
        yield
    finally:
        over.set()
        following.join()
        # The chain stays, empty: the kernel may still be busy with it.
        _inside(boxes, ["iptables", "-D", *jump])
        _inside(boxes, ["iptables-restore", "--noflush"], _table(boxes, []))
        assert not failures, failures


def _rules(boxes: Boxes, directions: Sequence[str]) -> list[str]:
    path = f"/apis/networking.k8s.io/v1/namespaces/{boxes.namespace}/networkpolicies"
    closing = [
        (policy["spec"]["podSelector"]["matchLabels"], DIRECTIONS[direction])
        for policy in ask(boxes.cluster, "GET", path)["items"]
        for direction in policy["spec"]["policyTypes"]
        if direction in directions
    ]
    return [
        f"-A {_chain(boxes)} {option} {address} -m conntrack --ctstate NEW -j REJECT"
        for pod in boxes.pods()
        if (address := pod["status"].get("podIP"))
        for labels, option in closing
        if _has(pod, labels)
    ]


def _has(pod: Any, labels: dict[str, str]) -> bool:
    return labels.items() <= pod["metadata"].get("labels", {}).items()


def _chain(boxes: Boxes) -> str:
    return f"TEST-{boxes.namespace}"  # of at most 28 characters


def _table(boxes: Boxes, rules: list[str]) -> str:
    chain = _chain(boxes)
    return "\n".join(["*filter", f":{chain} - [0:0]", f"-F {chain}", *rules, "COMMIT", ""])


def _inside(boxes: Boxes, argv: list[str], stdin: str = "") -> None:
    subprocess.run(boxes.cluster.inside(argv), input=stdin, text=True, check=True)
