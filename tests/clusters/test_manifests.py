"""The manifests against their published schemas, and against what the images and the run do.

Kubeflow Trainer's and Kubernetes' own models (kubeflow-trainer-api, generated from their OpenAPI) check all but the MPI
operator's own keys, which no package carries; these are written down here, from its API types v2beta1. With
DS_VRGD_CRDS=FOLDER, which holds the operators' CustomResourceDefinitions, their schemas check everything once more.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "scripts" / "kubernetes"
TRAINER, MPI, NAMESPACE, PREPARE = (
    KUBERNETES / f"{name}.yaml" for name in ("trainer", "mpijob", "namespace", "prepare")
)
COMPOSE = ROOT / "docker" / "compose.yaml"
#: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go: MPIJobSpec, RunPolicy, ReplicaSpec, MPIImplementation.
MPI_SPEC = {
    "slotsPerWorker": int,
    "runPolicy": dict,
    "mpiReplicaSpecs": dict,
    "sshAuthMountPath": str,
    "mpiImplementation": str,
    "launcherCreationPolicy": str,
}
RUN_POLICY = {"cleanPodPolicy": str, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int, "backoffLimit": int}
REPLICA_SPEC = {"replicas": int, "template": dict, "restartPolicy": str}
MPI_IMPLEMENTATIONS = ("OpenMPI", "Intel", "MPICH")
START_EXIT_STOPPED = 75
WORKDIR = PurePosixPath("/opt/ds_vrgd")
#: kubernetes.io, "Pod Security Standards", the level restricted: the volumes that it allows.
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}


def documents(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))}


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Return the keys that a model dropped, because its schema has none of them, and the values that it changed."""
    if isinstance(given, dict):
        return [
            fault
            for key, value in given.items()
            for fault in (lost(value, kept[key], f"{place}.{key}") if key in kept else [f"{place}.{key}"])
        ]
    if isinstance(given, list):
        return [
            f for i, (one, two) in enumerate(zip(given, kept, strict=True)) for f in lost(one, two, f"{place}[{i}]")
        ]
    return [] if given == kept else [place]


def faults(document: dict[str, Any], model: str) -> list[str]:
    """Return what Kubernetes would refuse or ignore.

    Quantities and ports may be written as numbers or strings; the models take strings.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api (extra: dev) is missing")
    written = quantities_as_text(document)
    return lost(written, getattr(models, model).from_dict(written).to_dict())


def quantities_as_text(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        if key in ("limits", "requests"):
            return {name: str(number) for name, number in value.items()}
        return {name: str(each) if name == "port" else quantities_as_text(each, name) for name, each in value.items()}
    return [quantities_as_text(each) for each in value] if isinstance(value, list) else value


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod of a document."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for each in value.values():
            yield from pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods(each)


def violations(pod: dict[str, Any]) -> list[str]:
    """Return why the level "restricted" of the Pod Security Standards would not admit the pod."""
    context = pod.get("securityContext", {})
    containers = pod["containers"] + pod.get("initContainers", [])
    return [
        *(name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)),
        *(f"volume {volume['name']}" for volume in pod["volumes"] if not RESTRICTED_VOLUMES & set(volume)),
        *(["runAsNonRoot"] if context.get("runAsNonRoot") is not True else []),
        *(["runAsUser"] if context.get("runAsUser") == 0 else []),
        *(["seccompProfile"] if context.get("seccompProfile") != {"type": "RuntimeDefault"} else []),
        *(
            f"{container['name']}: securityContext"
            for container in containers
            if container.get("securityContext")
            != {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        ),
    ]


MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
PODS = [pod for path in MANIFESTS for document in documents(path).values() for pod in pods(document)]


def test_every_pod_is_found() -> None:
    assert sorted(pod["containers"][0]["name"] for pod in PODS) == ["launcher", "node", "prepare", "worker"]


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["containers"][0]["name"])
def test_a_restricted_namespace_admits_every_pod(pod: dict[str, Any]) -> None:
    assert violations(pod) == []
    (container,) = pod["containers"]
    assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "docker" / "Dockerfile").read_text()
    resources = container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda pod: pod["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (lambda pod: pod["securityContext"].update(runAsNonRoot=False), "runAsNonRoot"),
        (lambda pod: pod["securityContext"].update(runAsUser=0), "runAsUser"),
        (lambda pod: pod["containers"][0].pop("securityContext"), "node: securityContext"),
        (lambda pod: pod["volumes"].append({"name": "ib", "hostPath": {"path": "/dev/infiniband"}}), "volume ib"),
        (lambda pod: pod.update(hostNetwork=True), "hostNetwork"),
    ],
)
def test_a_pod_with_privileges_is_found(spoil: Callable[[dict[str, Any]], object], found: str) -> None:
    (pod,) = (copy.deepcopy(pod) for pod in PODS if pod["containers"][0]["name"] == "node")
    spoil(pod)
    assert violations(pod) == [found]


def test_everything_is_in_the_restricted_namespace() -> None:
    namespace = documents(NAMESPACE)["Namespace"]["metadata"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    claim = documents(NAMESPACE)["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for path in MANIFESTS:
        for kind, document in documents(path).items():
            assert kind == "Namespace" or document["metadata"]["namespace"] == namespace["name"], path.name
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in PODS
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {claim["metadata"]["name"]}


def on_claim(path: str, container: dict[str, Any]) -> PurePosixPath:
    """Return where a path of a container lies on the claim.

    Raises:
        LookupError: it does not lie there.
    """
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "shared"]
    for mount in sorted(mounts, key=lambda mount: -len(mount["mountPath"])):
        with_root = WORKDIR / path
        if with_root.is_relative_to(mount["mountPath"]):
            return PurePosixPath(mount.get("subPath", "")) / with_root.relative_to(mount["mountPath"])
    raise LookupError(path)


def option(arguments: list[str], name: str) -> str:
    (value,) = (each.partition("=")[2] for each in arguments if each.startswith(f"--{name}="))
    return value


def test_the_prepared_data_are_where_the_run_file_looks_for_them() -> None:
    (prepare,) = next(pods(documents(PREPARE)))["containers"]
    written = on_claim(option(prepare["args"], "output"), prepare)
    (node,) = next(pods(documents(TRAINER)["TrainingRuntime"]))["containers"]
    replicas = documents(MPI)["MPIJob"]["spec"]["mpiReplicaSpecs"]
    launcher, worker = (replicas[kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))
    trained = [
        (documents(TRAINER)["TrainJob"]["spec"]["trainer"]["args"], node),
        (launcher["command"], worker),  # the ranks are the worker's
    ]
    for arguments, container in trained:
        run = yaml.safe_load((ROOT / option(arguments, "run")).read_text(encoding="utf-8"))
        assert on_claim(run["prepared_data"], container) == written
        assert on_claim(option(arguments, "output"), container)
    with pytest.raises(LookupError):
        on_claim("corpus/prepared", launcher)
    # The vocabulary and the lengths that the run file asks for.
    assert option(prepare["args"], "vocabulary") == "30522"


def test_kubernetes_knows_every_key() -> None:
    assert faults(documents(PREPARE)["Job"], "IoK8sApiBatchV1Job") == []


@pytest.mark.parametrize("path", [TRAINER, MPI], ids=lambda path: path.stem)
def test_rdma_is_a_line_to_uncomment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("# rdma/hca: 1") == 1
    uncommented = list(yaml.safe_load_all(text.replace("# rdma/hca: 1", "rdma/hca: 1")))
    with_gpus = [
        pod for pod in pods(uncommented) if "nvidia.com/gpu" in pod["containers"][0]["resources"].get("limits", {})
    ]
    assert [pod["containers"][0]["resources"]["limits"]["rdma/hca"] for pod in with_gpus] == [1]
    assert faults(with_gpus[0], "IoK8sApiCoreV1PodSpec") == []


@pytest.mark.skipif("DS_VRGD_CRDS" not in os.environ, reason="DS_VRGD_CRDS names no folder with the operators' CRDs")
def test_the_operators_own_schemas() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    schemas = {}
    for path in Path(os.environ["DS_VRGD_CRDS"]).glob("*.yaml"):
        definition = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        for version in definition["versions"]:
            key = (f"{definition['group']}/{version['name']}", definition["names"]["kind"])
            schemas[key] = strict(version["schema"]["openAPIV3Schema"])
    checked = 0
    for document in (*documents(TRAINER).values(), *documents(MPI).values()):
        schema = schemas[document["apiVersion"], document["kind"]]
        schema["properties"]["metadata"] = {}
        found = [f"{list(error.absolute_path)}: {error.message}" for error in validator(schema).iter_errors(document)]
        assert found == []
        misspelt = {**document, "spec": {**document["spec"], "specc": 1}}
        assert not validator(schema).is_valid(misspelt)
        checked += 1
    assert checked == 3


def strict(schema: Any) -> Any:
    """Return an OpenAPI schema of Kubernetes as a JSON schema without unknown keys, as the API server prunes them."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def test_trainer_knows_every_key() -> None:
    found = documents(TRAINER)
    assert faults(found["TrainingRuntime"], "TrainerV1alpha1TrainingRuntime") == []
    assert faults(found["TrainJob"], "TrainerV1alpha1TrainJob") == []


def test_a_misspelt_key_and_a_wrong_type_are_found() -> None:
    runtime = documents(TRAINER)["TrainingRuntime"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["terminationGraceSeconds"] = pod.pop("terminationGracePeriodSeconds")
    (fault,) = faults(runtime, "TrainerV1alpha1TrainingRuntime")
    assert fault.endswith(".template.spec.terminationGraceSeconds")
    job = documents(TRAINER)["TrainJob"]
    job["spec"]["trainer"]["numProcPerNode"] = "auto"  # as it was before Trainer 2.2
    with pytest.raises(ValueError, match="numProcPerNode"):
        faults(job, "TrainerV1alpha1TrainJob")


def test_trainer_does_what_the_images_need() -> None:
    found = documents(TRAINER)
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Trainer finds the job by its label, and sets PET_... in the container of this name.
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == replicated["name"] == "node"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["trainer"]["numProcPerNode"]
    # A pod failure policy is only allowed with pods that are never restarted in place.
    assert pod["restartPolicy"] == "Never"
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [START_EXIT_STOPPED]
    assert f"exit {START_EXIT_STOPPED}" in (ROOT / "docker" / "start.sh").read_text(encoding="utf-8")
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == [
        "PodFailurePolicy"
    ]
    # start.sh, the entry, notes the folder whose log the probe reads.
    assert "command" not in container
    assert_in_image(container["livenessProbe"]["exec"]["command"][0])
    assert_program_is_there(job["spec"]["trainer"]["args"])


def test_mpi_operator_knows_every_key() -> None:
    job = documents(MPI)["MPIJob"]
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    spec = job["spec"]
    for given, known in ((spec, MPI_SPEC), (spec["runPolicy"], RUN_POLICY)):
        assert {key: type(value) for key, value in given.items()}.items() <= known.items()
    assert spec["mpiImplementation"] in MPI_IMPLEMENTATIONS
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    assert set(spec["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for replica in spec["mpiReplicaSpecs"].values():
        assert {key: type(value) for key, value in replica.items()}.items() <= REPLICA_SPEC.items()
        assert replica["restartPolicy"] in ("Never", "OnFailure")  # the operator's own check
        assert faults(replica["template"], "IoK8sApiCoreV1PodTemplateSpec") == []


def test_mpi_job_does_what_the_images_need() -> None:
    spec = documents(MPI)["MPIJob"]["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker")
    )
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert launcher["command"][:2] == worker["command"][:2] == ["/usr/bin/tini", "--"]
    entry, *program = launcher["command"][2:]
    assert_in_image(entry)
    assert_program_is_there(program)
    config = Path(worker["command"][-1])
    assert spec["sshAuthMountPath"] in (ROOT / "docker" / config.name).read_text(encoding="utf-8")


def test_compose_starts_two_ranks_that_meet() -> None:
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    assert [service["environment"]["PET_NODE_RANK"] for service in services.values()] == ["0", "1"]
    for service in services.values():
        assert service["environment"]["PET_NNODES"] == str(len(services))
        assert service["environment"]["PET_MASTER_ADDR"] == next(iter(services))
        assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert_program_is_there(service["command"])


def test_images_hold_what_they_start() -> None:
    for name in ("Dockerfile", "Dockerfile.cpu"):
        text = (ROOT / "docker" / name).read_text(encoding="utf-8")
        sources = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for source in " ".join(sources).split():
            assert list(ROOT.glob(source)) or source == "ds_vrgd_*.py", f"{name} copies {source}"
        assert "ds_vrgd_*.py" in " ".join(sources).split()  # modules beside the package
        assert {"docker/start.sh", "docker/health.sh", "scripts/*.py", "configs"} <= set(" ".join(sources).split())
        users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
        assert users[-1] != "0"
        assert f"--uid {users[-1]}" in text
        # A health check that imports torch takes memory and seconds from the training.
        assert re.findall(r"HEALTHCHECK .* CMD (.+)", text) == ['["/opt/ds_vrgd/health.sh"]']
        assert re.findall(r"^ENTRYPOINT (.+)", text, re.MULTILINE) == [
            '["/usr/bin/tini", "--", "/opt/ds_vrgd/start.sh"]'
        ]
        assert "--no-install-recommends tini" in text
        labels = set(re.findall(r"org\.opencontainers\.image\.(\S+)=", text))
        assert {"title", "description", "licenses", "source", "version", "revision", "created", "base.name"} == labels


def assert_in_image(entry: str) -> None:
    path = PurePosixPath(entry)
    assert path.parent == WORKDIR
    assert os.access(ROOT / "docker" / path.name, os.X_OK)
    assert f"docker/{path.name}" in (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def assert_program_is_there(arguments: list[str]) -> None:
    program, *options = arguments
    assert (ROOT / program).exists()
    given = dict(option.removeprefix("--").split("=") for option in options)
    assert (ROOT / given["deepspeed_config"]).exists()
    assert (ROOT / given["run"]).exists()
    assert given["resume"] == "auto"
    assert given["output"].startswith(("/shared/", "/out/"))
