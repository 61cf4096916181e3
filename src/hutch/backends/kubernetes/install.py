"""What a cluster needs to run `hutch serve`: its objects, as values. Pure.

`deploy/helm/hutch` makes the same ones; a test compares them.

What a caller names is checked, and is a value of a field. Nothing here is text that is parsed
later, but for $(NAME) in variables, which a cluster would replace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hutch.errors import InvalidRequest

from .address import NAMESPACE
from .doctor import NEEDED, SHARING, WANTED, WANTED_EVERYWHERE, WANTED_FOR_ERRORS
from .pod import IMAGE, RUNTIME, literal, policies

NAME = "hutch"  # of the objects; what may be there twice in a cluster has the namespace in it, too
SECRET, SECRET_KEY = "hutch-key", "api-key"
PORT, SERVICE_PORT = 8080, 80
USER = 65532
DATA, DATA_FOLDER = "/data", "/data/hutch"  # the folder is the server's own, the volume is root's
DRAIN = "drain_seconds"
AFTER_DRAIN = 30  # seconds to write down what is there

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_CLASS = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]{0,8}(Mi|Gi|Ti)")

Object = dict[str, object]


@dataclass(frozen=True)
class Installation:
    """What somebody chooses. Raises InvalidRequest for what a cluster would not take.

    `settings`: more of the server's, as variables; the caller checks them. `drain`: seconds that
    the server waits for running requests when it is stopped. `replicas`: servers; more than one
    keep what they share in the namespace of the boxes, and have a volume each.
    """

    image: str
    runtime_image: str = ""  # empty: the same image
    namespace: str = "hutch"
    boxes_namespace: str = "hutch-boxes"
    boxes: int = 100  # at most, at once
    runtime: str = ""  # a RuntimeClass for all boxes
    hosts: tuple[str, ...] = ()  # names that clients use, beside those of the Service
    storage: str = "10Gi"
    storage_class: str = ""  # empty: the cluster's default
    replicas: int = 1
    drain: float = 10.0
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, text, pattern, allowed in (
            ("image", self.image, IMAGE, "the name of an image"),
            ("runtime image", self.runtime_image or self.image, IMAGE, "the name of an image"),
            ("namespace", self.namespace, NAMESPACE, "a-z, 0-9 and, between them, '-'"),
            ("namespace", self.boxes_namespace, NAMESPACE, "a-z, 0-9 and, between them, '-'"),
            ("runtime", self.runtime or "x", RUNTIME, "the name of a RuntimeClass"),
            ("storage", self.storage, _QUANTITY, "such as 10Gi"),
            ("storage class", self.storage_class or "x", _CLASS, "the name of a StorageClass"),
            *(("host", host, _HOST, "a name without a port") for host in self.hosts),
        ):
            if not pattern.fullmatch(text):
                raise InvalidRequest(f"{what} {text!r:.200}: it has to be {allowed}")
        if self.namespace == self.boxes_namespace:
            raise InvalidRequest(
                f"the server and its boxes need a namespace each, not both {self.namespace}: who "
                "may change Pods in the one could otherwise change the server"
            )
        if not 0 < self.boxes <= 1_000_000:
            raise InvalidRequest(f"boxes: from 1 to 1000000, not {self.boxes}")
        if not 0 < self.replicas <= 100:
            raise InvalidRequest(f"replicas: from 1 to 100, not {self.replicas}")

    def objects(self) -> list[Object]:
        """All of them, in an order in which they can be made."""
        return [
            self._namespace(self.namespace),
            self._namespace(self.boxes_namespace),
            *self._rights(),
            self._quota(),
            self._defaults(),
            *(_of(policy, self.boxes_namespace) for policy in policies().values()),
            *([self._deployment(), self._volume()] if self.replicas == 1 else [self._set()]),
            self._service(),
            self._disruptions(),
        ]

    def _namespace(self, name: str) -> Object:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        return {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels},
        }

    def _rights(self) -> list[Object]:
        subject = {"kind": "ServiceAccount", "name": NAME, "namespace": self.namespace}
        over_all = f"{NAME}-{self.namespace}"
        unbound = {"name": over_all, "labels": LABELS}
        return [
            _object("v1", "ServiceAccount", self.namespace),
            {
                **_object(RBAC, "Role", self.boxes_namespace),
                "rules": _rules(
                    *NEEDED,
                    *WANTED,
                    *WANTED_FOR_ERRORS,
                    *(SHARING if self.replicas > 1 else ()),
                ),
            },
            {
                **_object(RBAC, "RoleBinding", self.boxes_namespace),
                "roleRef": {"apiGroup": RBAC_GROUP, "kind": "Role", "name": NAME},
                "subjects": [subject],
            },
            {
                "apiVersion": RBAC,
                "kind": "ClusterRole",
                "metadata": unbound,
                "rules": _rules(*WANTED_EVERYWHERE),
            },
            {
                "apiVersion": RBAC,
                "kind": "ClusterRoleBinding",
                "metadata": unbound,
                "roleRef": {"apiGroup": RBAC_GROUP, "kind": "ClusterRole", "name": over_all},
                "subjects": [subject],
            },
        ]

    def _quota(self) -> Object:
        """What all boxes together may have: for each a little more than a box has by default."""
        return {
            **_object("v1", "ResourceQuota", self.boxes_namespace),
            "spec": {
                "hard": {
                    "pods": str(self.boxes),
                    "limits.cpu": str(3 * self.boxes),
                    "limits.memory": f"{1280 * self.boxes}Mi",
                    "limits.ephemeral-storage": f"{self.boxes}Gi",
                }
            },
        }

    def _defaults(self) -> Object:
        """For Pods that are not ours: under a quota, one without limits would be refused."""
        limits = {
            "type": "Container",
            "default": {"cpu": "1", "memory": "128Mi", "ephemeral-storage": "64Mi"},
            "defaultRequest": {"cpu": "10m", "memory": "32Mi", "ephemeral-storage": "1Mi"},
        }
        return {
            **_object("v1", "LimitRange", self.boxes_namespace),
            "spec": {"limits": [limits]},
        }

    def _claim(self) -> Object:
        """What a volume with a data folder has to be."""
        spec: Object = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": self.storage}},
        }
        if self.storage_class:
            spec["storageClassName"] = self.storage_class
        return spec

    def _volume(self) -> Object:
        claim = _object("v1", "PersistentVolumeClaim", self.namespace)
        return {**claim, "spec": self._claim()}

    def _deployment(self) -> Object:
        volume: Object = {"name": "data", "persistentVolumeClaim": {"claimName": NAME}}
        return {
            **_object("apps/v1", "Deployment", self.namespace),
            "spec": {
                # Sessions are in a database in the data folder, which one server at a time has.
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": SELECTOR},
                "template": self._template(volume),
            },
        }

    def _set(self) -> Object:
        """Several servers. Sessions that sleep are in the data folder of the one that had them."""
        return {
            **_object("apps/v1", "StatefulSet", self.namespace),
            "spec": {
                "replicas": self.replicas,
                "serviceName": NAME,
                # One after another would wait forever for one that does not start.
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": SELECTOR},
                "template": self._template(),
                "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": self._claim()}],
            },
        }

    def _template(self, *volumes: Object) -> Object:
        return {
            "metadata": {
                "labels": LABELS,
                "annotations": {
                    "prometheus.io/scrape": "true",
                    "prometheus.io/port": str(PORT),
                    "prometheus.io/path": "/metrics",
                },
            },
            "spec": self._pod(*volumes),
        }

    def _pod(self, *volumes: Object) -> Object:
        return {
            "serviceAccountName": NAME,
            # Otherwise there would be a variable HUTCH_PORT, for the Service is named so.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(self.drain) + AFTER_DRAIN,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                # Always would open files to the group that the server keeps to itself.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "server",
                    "image": self.image,
                    "imagePullPolicy": "IfNotPresent",
                    "args": ["serve"],
                    "env": self._env(),
                    "ports": [{"name": "http", "containerPort": PORT}],
                    "startupProbe": _probe("/healthz", every=2, failures=150),
                    "livenessProbe": _probe("/healthz", every=10, failures=6),
                    "readinessProbe": _probe("/readyz", every=5, failures=3),
                    "resources": {
                        "requests": {"cpu": "250m", "memory": "256Mi"},
                        "limits": {"memory": "2Gi", "ephemeral-storage": "1Gi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": "data", "mountPath": DATA},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [*volumes, {"name": "tmp", "emptyDir": {"sizeLimit": "512Mi"}}],
        }

    def _env(self) -> list[Object]:
        service = [NAME, f"{NAME}.{self.namespace}", f"{NAME}.{self.namespace}.svc"]
        plain = {
            "HOME": "/tmp",
            "HUTCH_DATA_DIR": DATA_FOLDER,
            "HUTCH_LISTEN": f"0.0.0.0:{PORT}",
            "HUTCH_ALLOWED_HOSTS": ",".join(
                [*service, f"{service[-1]}.cluster.local", *self.hosts]
            ),
            "HUTCH_BACKEND": "kubernetes",
            "HUTCH_KUBERNETES_NAMESPACE": self.boxes_namespace,
            "HUTCH_KUBERNETES_RUNTIME_IMAGE": self.runtime_image or self.image,
        }
        if self.runtime:
            plain["HUTCH_RUNTIME"] = self.runtime
        plain |= {name: literal(value) for name, value in self.settings.items()}
        key = {"name": SECRET, "key": SECRET_KEY}
        variables: list[Object] = [{"name": name, "value": plain[name]} for name in plain]
        if self.replicas > 1:
            own = {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}
            variables += [
                {"name": "POD_IP", "valueFrom": own},
                {"name": "HUTCH_KUBERNETES_REPLICA_URL", "value": f"http://$(POD_IP):{PORT}"},
            ]
        return [*variables, {"name": "HUTCH_API_KEY", "valueFrom": {"secretKeyRef": key}}]

    def _service(self) -> Object:
        port = {"name": "http", "port": SERVICE_PORT, "targetPort": "http"}
        return {
            **_object("v1", "Service", self.namespace),
            "spec": {"selector": SELECTOR, "ports": [port]},
        }

    def _disruptions(self) -> Object:
        # A server that is moved costs its open connections, and no session: nodes may be drained.
        return {
            **_object("policy/v1", "PodDisruptionBudget", self.namespace),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": SELECTOR}},
        }


RBAC_GROUP = "rbac.authorization.k8s.io"
RBAC = f"{RBAC_GROUP}/v1"
SELECTOR = {"app.kubernetes.io/name": NAME}
LABELS = {**SELECTOR, "app.kubernetes.io/component": "server"}


def _rules(*rights: tuple[str, str, str]) -> list[Object]:
    """Verbs, with their resources and groups, as rules by resource."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for verb, resource, group in rights:
        verbs.setdefault((group, resource), []).append(verb)
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": allowed}
        for (group, resource), allowed in verbs.items()
    ]


def _object(version: str, kind: str, namespace: str) -> Object:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": NAME, "namespace": namespace, "labels": LABELS},
    }


def _of(policy: Object, namespace: str) -> Object:
    metadata = policy["metadata"]
    assert isinstance(metadata, dict)
    return {**policy, "metadata": {**metadata, "namespace": namespace}}


def _probe(path: str, *, every: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": every,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
