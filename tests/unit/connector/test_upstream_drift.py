"""vLLM moves its internals between releases: a move of anything that kvtop relies on fails here, by name.

The installed vLLM and the next release are both read as source, so this needs no engine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvtop.connector.relied_on import RELIED_ON, RELIED_ON_NAMES
from tests.support.surface import missing, overridden

REPOSITORY = Path(__file__).parents[3]
CONNECTOR_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"


def _installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed: run the tests with `make test`"
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def _next_release() -> Path:
    root = REPOSITORY / ".upstream"
    assert (root / "vllm").is_dir(), "the next vLLM release is not unpacked: run the tests with `make test`"
    return root


@pytest.fixture(params=[_installed, _next_release], ids=["installed", "next release"])
def vllm_source(request: pytest.FixtureRequest) -> Path:
    root: Path = request.param()
    return root


def test_all_that_kvtop_relies_on_is_where_it_was(vllm_source: Path) -> None:
    assert list(missing(vllm_source, RELIED_ON, RELIED_ON_NAMES)) == []


def test_a_moved_method_a_lost_parameter_and_a_vanished_name_are_each_named(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text("class A:\n    def kept(self, x): self.y = x\n")
    relied_on = {"pkg.mod:A": {"kept": ("x", "lost"), "moved": ()}, "pkg.mod:B": {}, "pkg.gone:C": {}}

    assert sorted(missing(tmp_path, relied_on, {"pkg.mod": ("y", "vanished")})) == [
        "pkg.gone is gone",
        "pkg.mod no longer mentions vanished",
        "pkg.mod:A.kept lost its parameter lost",
        "pkg.mod:A.moved is gone",
        "pkg.mod:B is gone",
    ]


def test_every_hook_that_upstreams_connectors_implement_reaches_the_halves(vllm_source: Path) -> None:
    """A hook that upstream adds must be forwarded, or decided against here with a reason."""
    stateless = {
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_finished_count",
        "get_loaded_kv_cache_group_ids",
        "get_required_kvcache_layout",
        "save_kv_layer",
        "supports_divergent_local_hybrid_hits",
        "wait_for_layer_load",
    }
    sleep_mode_that_push_cannot_have = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    hooks = set().union(
        *(
            overridden(vllm_source, CONNECTOR_MODULE, name)
            for name in ("NixlBaseConnector", "NixlPushConnector", "NixlPullConnector")
        )
    )

    forwarded = set().union(
        *(
            overridden(REPOSITORY / "src", f"kvtop.connector.{module}", name)
            for module, name in (
                ("kvtop_connector", "KvtopConnector"),
                ("scheduler_side", "SchedulerSide"),
                ("worker_side", "WorkerSide"),
            )
        )
    )

    assert hooks - stateless - sleep_mode_that_push_cannot_have - forwarded == set()
