"""CUDA graphs, policies on a device and means of losses; the GPU's own part is in test_gpu.py."""

import collections
import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cleanrl_utils.running.losses import Means, clip, larger, mean_of, squared_error, stack
from cleanrl_utils.speed import graphs
from cleanrl_utils.speed.graphs import CudaGraph, accelerate, capture, copy_of
from cleanrl_utils.speed.inference import PolicyOnDevice
from cleanrl_utils.speed.matmul import fast_matmul

CPU = torch.device("cpu")
EPYC = {"cpu_name": "AMD EPYC", "avx512_f": True, "amx_tile": False}


class FakeCuda:
    """As much of torch.cuda as a CudaGraph needs; a captured function is called on replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.capturing = 0
        self.replays = 0
        self.compiled = 0  # graphs by torch.compile
        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes: dict[str, Any] = {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "is_current_stream_capturing": lambda: self.capturing > 0,
            "CUDAGraph": lambda: SimpleNamespace(replay=self.replay),
            "graph": self.graph,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(graphs, "number_compiled", lambda: self.compiled)

    def replay(self) -> None:
        self.replays += 1

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any, capture_error_mode: str) -> Any:
        self.capturing += 1
        try:
            yield
        finally:
            self.capturing -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_graph_is_captured_after_three_calls_on_the_tensors_it_will_replay(cuda) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((id(x), x.tolist()))
        return 2 * x

    graph = CudaGraph(function)
    found = [graph(torch.full((1,), float(i))).tolist() for i in range(6)]
    assert found[:3] == [[0.0], [2.0], [4.0]] and cuda.replays == 3
    assert [values for _, values in seen] == [[0.0], [1.0], [2.0], [3.0]]  # the last one captured
    assert len({tensor for tensor, _ in seen}) == 1
    assert graph.inputs[0].item() == 5  # what the replay reads


def test_warm_up_lasts_until_nothing_is_compiled_any_more(cuda) -> None:
    calls = []

    def function() -> None:
        calls.append(cuda.capturing)
        cuda.compiled += len(calls) <= 5

    graph = CudaGraph(function)
    for _ in range(8):
        graph()
    assert calls == [0] * 6 + [1] and cuda.replays == 2


def test_a_failed_capture_is_named_and_never_replayed(cuda) -> None:
    def update() -> None:
        if cuda.capturing:
            raise ValueError("operation not permitted when stream is capturing")

    graph = CudaGraph(update)
    for _ in range(3):
        graph()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="update .*--no-cudagraphs") as failed:
            graph()
        assert "not permitted" in str(failed.value.__cause__)
    assert graph.graph is None and cuda.replays == 0


def test_a_graph_within_a_graph_is_a_part_of_it(cuda) -> None:
    captured = []
    inner = CudaGraph(lambda: captured.append(cuda.capturing))
    outer = CudaGraph(lambda: inner())
    for _ in range(5):
        outer()
    assert captured == [0, 0, 0, 1] and inner.graph is None and cuda.replays == 2


def test_a_graph_takes_the_shapes_that_it_was_captured_with(cuda) -> None:
    graph = CudaGraph(lambda x: None)
    graph(torch.ones(3, 2))
    for shape in ((1, 2), (2,), (3, 1)):  # each would broadcast
        with pytest.raises(AssertionError, match="captured"):
            graph(torch.ones(shape))


def test_what_a_graph_returns_is_copied_whatever_holds_it() -> None:
    Pair = collections.namedtuple("Pair", "x y")
    x = torch.zeros(2)
    copy = copy_of({"a": x, "b": Pair(x, [x, (x, None)])})
    x += 1
    assert isinstance(copy["b"], Pair) and copy["b"].y[1][1] is None
    for found in (copy["a"], copy["b"].x, copy["b"].y[0], copy["b"].y[1][0]):
        assert found.tolist() == [0, 0]
    with pytest.raises(TypeError, match="SimpleNamespace"):
        copy_of([SimpleNamespace(x=x)])


def test_flags_and_device_choose_graph_and_compiler(cuda, monkeypatch) -> None:
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch, "compile", lambda f: ("compiled", f))
    args = SimpleNamespace(compile=False, cudagraphs=True, torch_deterministic=True)
    assert accelerate(torch.neg, CPU, args) is torch.neg
    assert isinstance(accelerate(torch.neg, gpu, args), CudaGraph)
    args.compile = True
    assert accelerate(torch.neg, CPU, args) == ("compiled", torch.neg)
    assert accelerate(torch.neg, gpu, args).function == ("compiled", torch.neg)
    assert capture(torch.neg, gpu, args).function is torch.neg
    args.cudagraphs = False
    assert capture(torch.neg, gpu, args) is torch.neg


def test_a_policy_takes_and_returns_numpy() -> None:
    args = SimpleNamespace(compile=False, cudagraphs=True, torch_deterministic=True)
    weight = torch.ones(2, requires_grad=True)
    policy = PolicyOnDevice(lambda obs: -obs * weight, CPU, args)
    obs = policy.start(np.array([[1.0, -2.0]]))
    assert obs.dtype == torch.float32 and obs.tolist() == [[1, -2]]
    assert policy.result().tolist() == [[-1.0, 2.0]] and policy.result().dtype == np.float32
    assert policy(np.array([[3.0, 4.0]])).tolist() == [[-3, -4]]


def test_compile_is_for_the_policy_not_for_its_copies(monkeypatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda f: given.append(f) or f)
    args = SimpleNamespace(compile=True, cudagraphs=True, torch_deterministic=True)
    PolicyOnDevice(torch.neg, CPU, args)
    assert [f.__wrapped__ for f in given] == [torch.neg]


def losses(a: float, b: float) -> dict[str, torch.Tensor]:
    return {"losses/a": torch.tensor(a), "losses/b": torch.tensor(b)}


def test_means_are_those_since_they_were_last_taken_and_survive_a_checkpoint() -> None:
    means = Means()
    assert means.take() == {}
    means.add(losses(1.0, 10.0))
    means.add(losses(2.0, 20.0))
    resumed = Means()
    resumed.load_state_dict(means.state_dict())
    for some in (means, resumed):
        some.add(losses(6.0, 60.0))
        assert some.take() == {"losses/a": 3.0, "losses/b": 30.0}
        assert some.take() == {}  # nothing since
    means.load_state_dict(Means().state_dict())
    assert means.take() == {}


def test_resumed_means_can_be_taken_at_once() -> None:
    means, resumed = Means(), Means()
    means.add(losses(1.0, 2.0))
    resumed.load_state_dict(means.state_dict())
    assert resumed.take() == {"losses/a": 1.0, "losses/b": 2.0}


def test_mean_of_updates() -> None:
    found = mean_of([losses(1.0, 10.0), losses(3.0, 30.0)])
    assert {tag: x.item() for tag, x in found.items()} == {"losses/a": 2.0, "losses/b": 20.0}


def test_parts_of_losses_and_their_gradients_are_those_of_torch() -> None:
    torch.manual_seed(1)
    advantages = torch.randn(1000)
    ratio = (1 + 0.3 * torch.randn(1000)).requires_grad_()
    ours = larger(-advantages * ratio, -advantages * clip(ratio, 0.8, 1.2))
    torchs = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    errors = squared_error(ratio, advantages), (ratio - advantages).square()
    for pair in ((ours, torchs), errors):
        assert torch.equal(*pair)
        assert torch.equal(*(torch.autograd.grad(x.sum(), ratio)[0] for x in pair))
    two = torch.randn(2, 5)
    assert torch.equal(squared_error(two, two[0]), (two - two[0]).square())


def test_losses_of_epochs_are_averaged_over_all_minibatches() -> None:
    epochs = [stack([{"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}]) for _ in range(2)]
    assert epochs[0]["a"].tolist() == [1.0, 2.0]
    assert mean_of(epochs)["a"] == 1.5
    assert mean_of([{"a": torch.tensor(1.0)}, {"a": torch.tensor(4.0)}])["a"] == 2.5


def test_fast_products_on_a_cpu_keep_all_bits_of_float32() -> None:
    """TF32 or bfloat16 would err by 1e-3 and more."""
    fast_matmul(CPU)
    torch.manual_seed(1)
    x = torch.randn(2, 256, 256, requires_grad=True)
    weight = torch.randn(2, 256, 256)
    torch.bmm(x, weight).square().mean().backward()
    exact = x.detach().double().requires_grad_()
    torch.bmm(exact, weight.double()).square().mean().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "cpu, precision",
    [
        (EPYC, "medium"),
        (EPYC | {"avx512_f": False}, "high"),
        (EPYC | {"amx_tile": True}, "high"),  # there, oneDNN would compute in bfloat16
        (EPYC | {"cpu_name": "Intel(R) Xeon(R)"}, "high"),
        ({}, "high"),  # as on Arm
    ],
)
def test_onednn_multiplies_only_where_it_computes_in_float32(
    cpu: dict, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    fast_matmul(CPU)
    assert torch.get_float32_matmul_precision() == precision
    fast_matmul(torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == "high"
