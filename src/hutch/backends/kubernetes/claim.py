"""Folders of this machine that Pods can mount, as they are on a volume of the cluster.

An operator says that a folder here is what a PersistentVolumeClaim has. A workspace in it is then a
folder of the claim. Nothing else is mounted: a kubelet follows the links of a volume that lead to
another folder of it, and only the way to a workspace is one that no box can change.

A cluster starts no program that could give files away. So a box runs as the user who owns the
workspace: one of its own where root runs the server, else the server's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hutch.backends.base import Spec
from hutch.backends.contained import OWN_OF_FEW
from hutch.backends.linux.mounts import FoundMount, give_away, open_mounts, owner_of_mounts
from hutch.errors import BackendUnavailable, InvalidRequest
from hutch.types import ClusterSettings

_NAME = re.compile("[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ClaimMount:
    """A folder of a claim, and where a box has it."""

    sub_path: str
    target: str
    read_only: bool
    owner: int  # the user id that it has


@dataclass(frozen=True)
class ClaimMounts:
    """What of a claim one box has."""

    claim: str = ""
    mounts: tuple[ClaimMount, ...] = ()
    owner: tuple[int, int] | None = None  # user and group of what it may write to


def find_mounts(spec: Spec, settings: ClusterSettings) -> ClaimMounts:
    """The mounts of a box. Folders of root are given to a user first. It blocks.

    Raises InvalidRequest for what cannot be mounted.
    """
    if any(mount.source not in spec.give for mount in spec.mounts):
        raise InvalidRequest(
            "folders of this machine cannot be mounted in a Pod: copy the files into the box"
        )
    if not settings.volume_claim:
        raise InvalidRequest(
            "workspaces cannot be mounted in a Pod, unless they are on a volume of the cluster: "
            "set kubernetes.volume_claim, or copy the files into the box"
        )
    with open_mounts(spec.mounts, spec.give) as opened:
        paths = [_sub_path(mount, settings) for mount in opened]
        try:
            found = give_away(opened, OWN_OF_FEW)
        except OSError as exc:
            raise BackendUnavailable(
                f"{opened[0].source} cannot be given a user of its own ({exc.strerror}): let the "
                "volume take root for root (NFS: no_root_squash), or an ordinary user run the "
                "server"
            ) from None
    owner = None
    if spec.user == "user":  # else the caller chose a user, and with it what the box may write to
        owner = owner_of_mounts(found, relaxed="user" in spec.relax)
    mounts = tuple(
        ClaimMount(path, mount.target, mount.read_only, mount.owner[0])
        for path, mount in zip(paths, found, strict=True)
    )
    return ClaimMounts(settings.volume_claim, mounts, owner)


def _sub_path(mount: FoundMount, settings: ClusterSettings) -> str:
    """The path of an open folder below the root of the claim."""
    top = os.path.realpath(settings.volume_folder)
    try:
        device = os.stat(top).st_dev
    except OSError as exc:
        raise BackendUnavailable(
            f"kubernetes.volume_folder: {settings.volume_folder}: {exc.strerror}"
        ) from None
    path = os.path.relpath(mount.source, top)
    names = path.split("/")
    if names[0] in (".", "..") or not all(map(_NAME.fullmatch, names)):
        raise InvalidRequest(
            f"{mount.source} cannot be mounted in a Pod: claim {settings.volume_claim} has what is "
            f"below {top} (kubernetes.volume_folder), in folders whose names are letters, digits, "
            "'.', '_' and '-'"
        )
    if os.fstat(mount.fd).st_dev != device:
        raise InvalidRequest(
            f"{mount.source} cannot be mounted in a Pod: it is a file system of its own, and claim "
            f'{settings.volume_claim} has only that of {top}. workspace.quota_mode "kernel" does '
            "that"
        )
    return path
