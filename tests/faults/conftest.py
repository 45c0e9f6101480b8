from tests.worker.conftest import lab, make_lab

__all__ = ["lab", "make_lab"]
