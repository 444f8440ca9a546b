from tests.train.runs import group

__all__ = ["group"]
