"""The manifests of docker/kubernetes: what they contain, and what is wrong by their schemas.

Kubernetes' own kinds are checked with the schemas of kubernetes-validate, custom resources with
those of ``custom_resources.yaml``, which refer to the former for all parts of pods.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml
from referencing import Registry, Resource

from tests.docker.conftest import DOCKER

FOLDER: Final = DOCKER / "kubernetes"
NAMES: Final = sorted(path.stem for path in FOLDER.glob("*.yaml"))
_KUBERNETES: Final = "1.37"
"""The version whose schemas are used."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The pods that a resource makes."""

    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> dict[str, dict[str, Any]]:
        """The containers by name."""
        return {container["name"]: container for container in self.spec["containers"]}

    def port(self, name: str | int) -> int:
        """The number of a port of a container, by its name or number; ``KeyError`` if none has
        it."""
        ports = {
            key: port["containerPort"]
            for container in self.spec["containers"]
            for port in container.get("ports", ())
            for key in (port["name"], port["containerPort"])
        }
        number: int = ports[name]
        return number


def resources(name: str) -> list[dict[str, Any]]:
    """The resources of a manifest."""
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text("utf-8")))


def one(name: str, kind: str) -> dict[str, Any]:
    """The only resource of that kind in a manifest."""
    (found,) = [resource for resource in resources(name) if resource["kind"] == kind]
    return found


def pods(name: str) -> list[Pod]:
    """All kinds of pods that a manifest makes, as their controllers put them together."""
    return [
        pod
        for resource in resources(name)
        if (pod := _pod_of(resource, resources(name))) is not None
    ]


def pod_of(name: str) -> Pod:
    """The only kind of pod in a manifest."""
    (pod,) = pods(name)
    return pod


def errors(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource, and where in it."""
    key = f"{resource['apiVersion']} {resource['kind']}"
    custom = _custom_schemas()
    if key in custom:
        validator = jsonschema.Draft202012Validator(custom[key], registry=_registry())
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)]
    try:
        kubernetes_validate.validate(resource, _KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [error.message]
    return []


def _pod_of(resource: dict[str, Any], others: list[dict[str, Any]]) -> Pod | None:
    name, spec = resource["metadata"]["name"], resource.get("spec", {})
    if resource["kind"] == "Deployment":
        template = spec["template"]
    elif resource["kind"] == "LeaderWorkerSet":
        leader = spec["leaderWorkerTemplate"]["leaderTemplate"]
        own = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # the controller adds it
        labels = {**leader["metadata"]["labels"], **own}
        template = {**leader, "metadata": {**leader["metadata"], "labels": labels}}
    elif resource["kind"] == "ServingRuntime":
        (service,) = [other for other in others if other["kind"] == "InferenceService"]
        return _kserve_pod(spec, service["spec"]["predictor"])
    else:
        return None
    metadata = template["metadata"]
    return Pod(name, metadata["labels"], metadata.get("annotations", {}), template["spec"])


def _kserve_pod(runtime: dict[str, Any], predictor: dict[str, Any]) -> Pod:
    """The runtime's first container with what the predictor's model adds to it."""
    first, *others = runtime["containers"]
    given = predictor["model"].get("resources", {})
    merged = {
        kind: {**first["resources"].get(kind, {}), **given.get(kind, {})}
        for kind in ("requests", "limits")
    }
    pod = {key: value for key, value in predictor.items() if key not in ("model", "autoScaling")}
    return Pod(
        "minisgl-predictor",
        runtime["labels"],
        runtime["annotations"],
        {
            **pod,
            "containers": [{**first, "resources": merged}, *others],
            "volumes": runtime["volumes"],
        },
    )


@functools.cache
def _custom_schemas() -> dict[str, Any]:
    text = Path(__file__).with_name("custom_resources.yaml").read_text("utf-8")
    schemas: dict[str, Any] = yaml.safe_load(text)
    return schemas


@functools.cache
def _registry() -> Registry[Any]:
    """Finds Kubernetes' own schemas under ``k8s:`` and their names."""
    package = Path(kubernetes_validate.__file__).parent
    folder = package / f"kubernetes-json-schema/v{_KUBERNETES}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text("utf-8"))
    whole = Resource.from_contents(definitions)
    parts = {
        f"k8s:{name}": Resource.from_contents(
            {"$schema": definitions["$schema"], "$ref": f"{definitions['$id']}#/$defs/{name}"}
        )
        for name in definitions["$defs"]
    }
    return Registry[Any]().with_resources([(definitions["$id"], whole), *parts.items()])
