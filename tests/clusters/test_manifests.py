"""The manifests against their published schemas, and against what the images and the run do.

Kubeflow Trainer's and Kubernetes' own models (kubeflow-trainer-api, generated from their OpenAPI) check all but the MPI
operator's own keys, which no package carries; these are written down here, from its API types v2beta1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TRAINER, MPI, COMPOSE = (
    ROOT / "scripts" / "kubernetes" / "trainer.yaml",
    ROOT / "scripts" / "kubernetes" / "mpijob.yaml",
    ROOT / "docker" / "compose.yaml",
)
#: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go: MPIJobSpec, RunPolicy, ReplicaSpec, MPIImplementation.
MPI_SPEC = {
    "slotsPerWorker": int,
    "runPolicy": dict,
    "mpiReplicaSpecs": dict,
    "sshAuthMountPath": str,
    "mpiImplementation": str,
}
RUN_POLICY = {"cleanPodPolicy": str, "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int, "backoffLimit": int}
REPLICA_SPEC = {"replicas": int, "template": dict, "restartPolicy": str}
MPI_IMPLEMENTATIONS = ("OpenMPI", "Intel", "MPICH")
START_EXIT_STOPPED = 75


def documents(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))}


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Keys that a model has dropped, because its schema does not know them, and values that it has changed."""
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
    """What Kubernetes would refuse or ignore.

    Quantities and ports may be written as numbers or strings; the models take strings.
    """
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api (extra: dev) is missing")
    written = quantities_as_text(document)
    return lost(written, getattr(models, model).from_dict(written).to_dict())


def quantities_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: {name: str(number) for name, number in each.items()}
            if key in ("limits", "requests")
            else quantities_as_text(each)
            for key, each in value.items()
        }
    return [quantities_as_text(each) for each in value] if isinstance(value, list) else value


def test_trainer_knows_every_key() -> None:
    found = documents(TRAINER)
    assert faults(found["ClusterTrainingRuntime"], "TrainerV1alpha1ClusterTrainingRuntime") == []
    assert faults(found["TrainJob"], "TrainerV1alpha1TrainJob") == []


def test_a_misspelt_key_and_a_wrong_type_are_found() -> None:
    runtime = documents(TRAINER)["ClusterTrainingRuntime"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["terminationGraceSeconds"] = pod.pop("terminationGracePeriodSeconds")
    (fault,) = faults(runtime, "TrainerV1alpha1ClusterTrainingRuntime")
    assert fault.endswith(".template.spec.terminationGraceSeconds")
    job = documents(TRAINER)["TrainJob"]
    job["spec"]["trainer"]["numProcPerNode"] = "auto"  # as it was before Trainer 2.2
    with pytest.raises(ValueError, match="numProcPerNode"):
        faults(job, "TrainerV1alpha1TrainJob")


def test_trainer_does_what_the_images_need() -> None:
    found = documents(TRAINER)
    runtime, job = found["ClusterTrainingRuntime"], found["TrainJob"]
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
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
    assert_runs_without_privileges(pod)
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
        assert_runs_without_privileges(replica["template"]["spec"])


def test_mpi_job_does_what_the_images_need() -> None:
    spec = documents(MPI)["MPIJob"]["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker")
    )
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]
    entry, *program = launcher["command"]
    assert (ROOT / "docker" / Path(entry).name).exists()
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
            assert list(ROOT.glob(source)), f"{name} copies {source}"
        assert {"docker/start.sh", "scripts/*.py", "configs"} <= set(" ".join(sources).split())
        users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
        assert users[-1] != "0"
        assert f"--uid {users[-1]}" in text


def assert_runs_without_privileges(pod: dict[str, Any]) -> None:
    user = pod["securityContext"]["runAsUser"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"--uid {user} " in (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def assert_program_is_there(arguments: list[str]) -> None:
    program, *options = arguments
    assert (ROOT / program).exists()
    given = dict(option.removeprefix("--").split("=") for option in options)
    assert (ROOT / given["deepspeed_config"]).exists()
    assert (ROOT / given["run"]).exists()
    assert given["resume"] == "auto"
    assert given["output"].startswith(("/shared/", "/out/"))
