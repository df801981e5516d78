"""The files of ``deploy/``: what can be checked without a registry and a cluster."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import ROOT

from collab_llm_nodes.config import from_mapping, from_yaml
from collab_llm_nodes.protocols.edge_cloud.settings import VerifierConfig
from collab_llm_nodes.protocols.edge_cloud.verifier import VerifierMetrics
from collab_llm_nodes.transport.ray_serve import RayConfig

DEPLOY = ROOT / "deploy"
CONTAINERFILES = sorted(DEPLOY.glob("*.Containerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
COMPOSE_VLLM: dict[str, Any] = yaml.safe_load((DEPLOY / "compose_vllm.yaml").read_text())
MANIFEST: list[dict[str, Any]] = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
KUBERAY: list[dict[str, Any]] = [*yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())]
HAPROXY = (ROOT / "config" / "haproxy_verifier.cfg").read_text()
HAPROXY_VLLM = (DEPLOY / "haproxy_vllm.cfg").read_text()
Manifest = list[dict[str, Any]]


def of_kind(kind: str, manifest: Manifest = MANIFEST) -> dict[str, Any]:
    """Return the manifest's only object of ``kind``."""
    (found,) = (each for each in manifest if each["kind"] == kind)
    return found


def pod() -> dict[str, Any]:
    return dict(of_kind("Deployment")["spec"]["template"]["spec"])


def ray_pods() -> list[dict[str, Any]]:
    """Return the templates of KubeRay's pods, the head's first."""
    ray = of_kind("RayCluster", KUBERAY)["spec"]
    return [group["template"] for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"])]


def container(name: str, spec: dict[str, Any] | None = None) -> dict[str, Any]:
    (found,) = (each for each in (spec or pod())["containers"] if each["name"] == name)
    return dict(found)


def seconds(text: str) -> float:
    """Return a duration of compose, such as 30s."""
    return float(text.removesuffix("s"))


# Containerfiles.


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_hadolint_finds_nothing(file: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("no hadolint: pip install -r requirements/dev.txt")
    found = subprocess.run(["hadolint", str(file)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("file", CONTAINERFILES, ids=lambda file: file.name)
def test_what_containerfiles_copy_and_run_is_there(file: Path) -> None:
    text = re.sub(r"\\\n", " ", file.read_text())
    steps = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    words = {step[0] for step in steps}
    assert words >= {"ARG", "FROM", "RUN", "STOPSIGNAL", "ENTRYPOINT"}
    assert text.count("deploy/install.sh") == 1
    for step in steps:
        if step[0] in ("ENTRYPOINT", "CMD"):
            json.loads(" ".join(step[1:]))  # so that signals reach the program
        if step[0] == "COPY":
            assert all((ROOT / source).exists() for source in step[1:-1])


def test_triton_can_compile_in_the_verifiers_image() -> None:
    """Without a compiler or a cache the verifier would be right, and slow."""
    text = (DEPLOY / "verifier.Containerfile").read_text()
    (cache,) = re.findall(r"^ENV TRITON_CACHE_DIR=(\S+)", text, re.MULTILINE)
    mounts = [volume.split(":")[1] for volume in COMPOSE["services"]["verifier"]["volumes"]]
    assert Path(cache).parent in map(Path, mounts)
    mounts = [mount["mountPath"] for mount in container("verifier")["volumeMounts"]]
    assert Path(cache).parent in map(Path, mounts)
    assert "apt_install gcc libc6-dev python3-dev" in (DEPLOY / "install.sh").read_text()


def test_an_image_has_no_build_outputs_and_all_that_git_knows() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert {".git", ".venv", "build", "install"} <= ignored
    for needed in ("collab_llm_nodes", "config", "models", "requirements", "setup.py", "deploy"):
        assert (ROOT / needed).exists()
        assert needed not in ignored


def test_the_install_script_is_sound() -> None:
    script = DEPLOY / "install.sh"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    wrong = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "usage:" in wrong.stderr


# compose.yaml.


@pytest.mark.parametrize("compose", [COMPOSE, COMPOSE_VLLM], ids=["verifier", "vllm"])
def test_the_files_that_compose_mounts_are_there(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), f"{name}: {source}"
            else:
                assert source in compose["volumes"], f"{name}: {source}"
        for secret in service.get("secrets", ()):
            assert secret in compose["secrets"], name
        for network in service["networks"]:
            assert network in compose["networks"], name
        for other in service.get("depends_on", ()):
            assert other in compose["services"], name


def test_only_haproxy_and_grafana_have_ports_and_only_haproxy_reaches_the_verifier() -> None:
    ports = {name: s["ports"] for name, s in COMPOSE["services"].items() if "ports" in s}
    assert ports == {"haproxy": ["50551:50551"], "grafana": ["127.0.0.1:3000:3000"]}
    assert COMPOSE["services"]["verifier"]["networks"] == ["inside"]
    assert COMPOSE["networks"]["inside"]["internal"]


def test_robots_reach_vllm_through_haproxy_alone() -> None:
    services = COMPOSE_VLLM["services"]
    assert {name: s["ports"] for name, s in services.items() if "ports" in s} == {
        "haproxy": ["8443:8443"]
    }
    assert "outside" not in services["vllm"]["networks"]
    assert COMPOSE_VLLM["networks"]["inside"]["internal"]
    assert services["haproxy"]["environment"]["VLLM_ADDRESS"] == "vllm:8000"
    assert "--enable-scale-out" in services["vllm"]["command"]


def test_compose_gives_the_verifier_time_to_drain() -> None:
    config = from_yaml(VerifierConfig, DEPLOY / "verifier.yaml")
    verifier = COMPOSE["services"]["verifier"]
    assert seconds(verifier["stop_grace_period"]) > config.drain_s + 1
    assert verifier["healthcheck"]["test"][-1].rpartition(":")[2] == port(config.address)
    assert COMPOSE["services"]["haproxy"]["environment"]["VERIFIER_ADDRESS"].endswith(
        port(config.address)
    )
    assert config.client_header == "x-client", "as HAProxy sends it"
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"verifier:{port(config.metrics_address)}"]


def variables(container: dict[str, Any]) -> set[str]:
    return {variable["name"] for variable in container["env"]}


@pytest.mark.parametrize(
    ("given", "configuration"),
    [
        (set(COMPOSE["services"]["haproxy"]["environment"]), HAPROXY),
        (set(COMPOSE_VLLM["services"]["haproxy"]["environment"]), HAPROXY_VLLM),
        (variables(container("haproxy")), HAPROXY),
        (variables(container("haproxy", ray_pods()[0]["spec"])), HAPROXY),
    ],
    ids=["compose", "compose_vllm", "kubernetes", "kuberay"],
)
def test_haproxy_gets_each_variable_that_its_configuration_reads(
    given: set[str], configuration: str
) -> None:
    assert given == set(re.findall(r'"\$\{(\w+)\}"', configuration))


# Kubernetes.


def test_the_manifest_follows_the_schemas() -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("no kubernetes-validate: pip install -r requirements/dev.txt")
    import kubernetes_validate

    pods = [{"apiVersion": "v1", "kind": "Pod", **template} for template in ray_pods()]
    for each in pods:
        each["metadata"] = {"name": "of-ray", **each["metadata"]}
    for each in (*MANIFEST, *(o for o in KUBERAY if o["kind"] != "RayCluster"), *pods):
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_probes_and_drain_of_the_pod_fit_the_verifier() -> None:
    text = of_kind("ConfigMap")["data"]["verifier.yaml"]
    config = from_mapping(VerifierConfig, yaml.safe_load(text))
    verifier, haproxy = container("verifier"), container("haproxy")
    for probe in ("startupProbe", "readinessProbe"):
        assert str(verifier[probe]["grpc"]["port"]) == port(config.address), probe
    assert {str(p["containerPort"]) for p in verifier["ports"]} == {
        port(config.address),
        port(config.metrics_address),
    }
    pause = float(verifier["lifecycle"]["preStop"]["exec"]["command"][-1])
    lives = float(haproxy["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pause + config.drain_s + 1 < lives < pod()["terminationGracePeriodSeconds"]
    assert config.client_header == "x-client"


def test_the_network_policy_admits_robots_to_haproxy_alone() -> None:
    rules = of_kind("NetworkPolicy")["spec"]["ingress"]
    open_to_all = [p["port"] for rule in rules if "from" not in rule for p in rule["ports"]]
    assert open_to_all == [50551]
    assert of_kind("Service")["spec"]["ports"][0]["port"] == 50551


def test_labels_volumes_and_references_of_the_manifest_agree() -> None:
    deployment = of_kind("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert of_kind("Service")["spec"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    volumes = {volume["name"] for volume in pod()["volumes"]}
    for each in pod()["containers"]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        assert not each["securityContext"]["allowPrivilegeEscalation"]
        assert each["securityContext"]["readOnlyRootFilesystem"]


# KubeRay.


def test_ray_is_the_version_that_the_image_has() -> None:
    version = of_kind("RayCluster", KUBERAY)["spec"]["rayVersion"]
    assert f"=={version}\n" in (ROOT / "requirements" / "ray.txt").read_text()


def test_replicas_ports_and_drain_of_the_ray_cluster_fit_the_verifier() -> None:
    settings = yaml.safe_load(of_kind("ConfigMap", KUBERAY)["data"]["verifier.yaml"])
    ray = from_mapping(RayConfig, settings.pop("ray"))
    config = from_mapping(VerifierConfig, settings)
    head, worker = (template["spec"] for template in ray_pods())
    (group,) = of_kind("RayCluster", KUBERAY)["spec"]["workerGroupSpecs"]
    assert group["replicas"] == ray.replicas
    resources = container("ray-worker", worker)["resources"]
    assert float(resources["limits"]["nvidia.com/gpu"]) == ray.gpus_per_replica
    assert float(resources["requests"]["cpu"]) == ray.cpus_per_replica
    verifier = container("verifier", head)
    assert str(verifier["readinessProbe"]["grpc"]["port"]) == port(config.address)
    assert config.client_header == "x-client"
    for spec, name in ((head, "ray-head"), (worker, "ray-worker")):
        lives = float(container(name, spec)["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert config.drain_s + 20 < lives < spec["terminationGracePeriodSeconds"]


def test_only_haproxy_of_the_ray_cluster_is_open_to_robots() -> None:
    policies = [each["spec"] for each in KUBERAY if each["kind"] == "NetworkPolicy"]
    rules = [rule for policy in policies for rule in policy["ingress"]]
    assert [r["ports"] for r in rules if "from" not in r] == [[{"port": 50551}]]
    service = of_kind("Service", KUBERAY)["spec"]
    labels = ray_pods()[0]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    for template in ray_pods():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for each in template["spec"]["containers"]:
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
            assert not each["securityContext"]["allowPrivilegeEscalation"]


# Grafana, and the workflow.


def expressions() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana" / "verifier.json").read_text())
    for panel in board["panels"]:
        assert panel["description"], panel["title"]
        yield from (target["expr"] for target in panel["targets"])


def test_the_dashboard_shows_metrics_that_the_verifier_has() -> None:
    metrics = VerifierMetrics("verifier")
    known = {
        f"{family.name}{suffix}"
        for family in metrics.registry.collect()
        for suffix in ("", "_total", "_bucket", "_sum", "_count")
    }
    shown = {name for text in expressions() for name in re.findall(r"collab_llm_\w+", text)}
    assert len(shown) > 8
    assert shown <= known
    for text in expressions():
        assert text.count("(") == text.count(")")


def test_grafana_reads_the_prometheus_of_compose() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"].split("//")[1].split(":")[0] in COMPOSE["services"]
    board = (DEPLOY / "grafana" / "verifier.json").read_text()
    assert set(re.findall(r'"type": "prometheus",\s+"uid": "(\w+)"', board)) == {source["uid"]}


def test_the_workflow_builds_every_image() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert all(f"deploy/{file.name}" in workflow for file in CONTAINERFILES)


def port(address: str) -> str:
    return address.rpartition(":")[2]
