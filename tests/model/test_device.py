import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.core.errors import OutOfResources, UsageFault
from node.model import device as devices
from node.model.device import CONTEXT, Device, device_lost, out_of_memory, set_threads
from node.telemetry import resources
from node.telemetry.resources import GroupMemory


def test_auto_without_a_gpu_is_the_cpu_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = Device.pick("auto")
    assert device.device == torch.device("cpu")
    with device.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    device.synchronise()


class Cards:
    """GPUs of a machine. ``contexts``: numbers of those on which torch made one, which takes
    memory; ``full``: those that give none."""

    def __init__(self, *free: int) -> None:
        self.free = [*free]
        self.contexts: set[int] = set()
        self.full: set[int] = set()

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if index in self.full:
            raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemory")
        if index not in self.contexts:
            self.contexts.add(index)
            self.free[index] -= CONTEXT
        return self.free[index], 100 * CONTEXT


@pytest.fixture
def cards(monkeypatch):
    made = Cards(5 * CONTEXT, 9 * CONTEXT, 8 * CONTEXT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(made.free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", made.mem_get_info)
    monkeypatch.setattr(devices, "driver_memory", lambda i: (made.free[i], 100 * CONTEXT))
    monkeypatch.setattr(devices, "_entered", set())
    return made


def test_auto_takes_the_gpu_with_most_free_memory(cards):
    for _ in range(3):
        assert Device.pick("auto").device == torch.device("cuda", 1)
    assert cards.contexts == {1}, "memory that no process gives back"
    assert Device.pick("cuda:2").device == torch.device("cuda", 2)
    with pytest.raises(OutOfResources, match="cuda:0 to cuda:2"):
        Device.pick("cuda:3")


def test_without_the_drivers_word_torch_tells_the_memory(cards, monkeypatch):
    monkeypatch.setattr(devices, "driver_memory", lambda index: None)
    cards.full = {2}
    assert Device.pick("auto").device == torch.device("cuda", 1)
    assert cards.contexts == {0, 1}


def test_a_gpu_that_gives_no_context_is_passed_over(cards):
    cards.full = {1}
    assert Device.pick("auto").device == torch.device("cuda", 2)
    cards.full = {0, 1, 2}
    for name in ("auto", "cuda", "cuda:0"):
        with pytest.raises(OutOfResources, match="cuda:0 cannot be used .*: out of memory") as e:
            Device.pick(name)
        assert "device cpu" in e.value.next_step


@pytest.mark.parametrize(
    ("card", "kinds", "fits"),
    [
        ((6, 1), "sm_75 sm_80 sm_90", False),
        ((6, 1), "sm_60", True),
        ((6, 1), "sm_62", False),
        ((8, 9), "sm_80 sm_90", True),
        ((10, 0), "sm_80 sm_90", False),
        ((10, 0), "sm_90 compute_90", True),
        ((8, 6), "sm_90 compute_90", False),
        ((12, 0), "sm_100 sm_120", True),
        ((9, 0), "gfx90a", True),
        ((9, 0), "", True),
    ],
)
def test_a_card_needs_kernels_that_run_on_it(cards, monkeypatch, card, kinds, fits):
    monkeypatch.setattr(torch.cuda, "get_arch_list", kinds.split)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA GeForce")
    if fits:
        assert Device.pick("auto").is_cuda
        return
    assert not Device.pick("auto").is_cuda
    for name in ("cuda", "cuda:0"):
        with pytest.raises(OutOfResources, match="cuda:0 .NVIDIA GeForce.* build of torch") as e:
            Device.pick(name)
        assert kinds in e.value.what
    assert not cards.contexts


def test_auto_passes_over_a_card_without_kernels(cards, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: (6, 1) if index == 1 else (8, 0)
    )
    assert Device.pick("auto").device == torch.device("cuda", 2)


def test_without_its_library_the_driver_tells_nothing(monkeypatch):
    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    assert devices.driver_memory(0) is None


def missing(name: str) -> None:
    raise OSError(name)


class Library:
    """The driver's library, with one card."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, card: object) -> int:
        return int(name != b"GPU-a-b")

    def nvmlDeviceGetMemoryInfo(self, card: object, memory: Any) -> int:
        memory._obj.free = 3
        memory._obj.total = 4
        return 0


@pytest.mark.parametrize(("uuid", "told"), [("a-b", (3, 4)), ("c-d", None)])
def test_the_driver_is_asked_by_the_name_of_a_card(monkeypatch, uuid, told):
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: Library())
    card = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    assert devices.driver_memory(0) == told


def test_an_absent_gpu_is_out_of_resources_with_a_next_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(OutOfResources) as caught:
            Device.pick(name)
        assert "device cpu" in caught.value.next_step


@pytest.mark.parametrize("name", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "mps"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UsageFault) as caught:
        Device.pick(name)
    assert "auto" in caught.value.next_step


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("capability", "usual"),
    [((6, 1), "fp32"), ((7, 5), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16")],
)
def test_a_gpu_computes_in_bf16_where_it_has_units_for_it(monkeypatch, capability, usual):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    card = Device(torch.device("cuda", 0))
    assert card.usual_format == usual
    assert card.older == (usual == "fp32")
    assert not Device(torch.device("cpu")).older
    plain = isinstance(card.autocast(), contextlib.nullcontext)
    assert plain == (usual == "fp32")
    assert Device(torch.device("cpu")).usual_format == "fp32"


def test_the_peak_remembers_memory_that_is_free_again():
    device = Device.pick("cpu")
    held = torch.ones(1 << 24)
    del held
    assert device.memory_peak() - device.memory_used() > 60 << 20


def test_device_memory_is_reported_in_bytes():
    device = Device.pick("cpu")
    assert 10 << 20 < device.memory_used() < device.memory_limit()
    assert 0 < device.memory_free() < device.memory_limit()
    assert "cpu" in device.describe()
    assert "GiB" in device.describe()


def test_the_limit_of_a_control_group_counts(monkeypatch):
    monkeypatch.setattr(resources, "memory_limits", lambda: [GroupMemory(1 << 20, 1 << 19)])
    assert Device.pick("cpu").memory_limit() == 1 << 20
    assert Device.pick("cpu").memory_free() == 1 << 19


def test_the_number_of_threads_is_set(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(devices, "prefer_faster", chosen.append)
    for threads, found in ((0, resources.cores()), (1, 1)):
        set_threads(threads)
        assert torch.get_num_threads() == found
    assert chosen == [resources.cores(), 1], "the library is measured with these threads"


@pytest.mark.parametrize("onednn", [False, True])
def test_the_library_of_another_process_is_followed_without_a_measurement(monkeypatch, onednn):
    followed: list[bool] = []
    monkeypatch.setattr(devices, "prefer_faster", lambda threads: pytest.fail("measured"))
    monkeypatch.setattr(devices, "follow", followed.append)
    set_threads(1, onednn)
    assert followed == [onednn]


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error, short):
    assert out_of_memory(error) == short


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_after_which_a_gpu_is_of_no_more_use(error, lost):
    assert device_lost(error) == lost


def test_a_share_of_a_card_is_a_bound_for_torch(monkeypatch):
    told = []
    monkeypatch.setattr(devices, "driver_memory", lambda index: (1, 1000))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: told.append(share)
    )
    for limit in (250, 1000, 2000):
        Device(torch.device("cuda", 0)).keep_within(limit)
    assert told == [0.25, 1.0, 1.0]
    Device.pick("cpu").keep_within(1)
    assert len(told) == 3, "main memory has no such bound"
