"""Every error that autotp raises on purpose. All derive from `AutoTPError`."""


class AutoTPError(Exception):
    """Base class: the message says what is wrong, where, why, and what to do."""


class InputError(AutoTPError, ValueError):
    """An argument of a public function, or an input of the model, cannot be used."""


class CaptureError(AutoTPError):
    """`torch.export` could not turn the model into a graph; the user's own line is in the message."""


class PlanError(AutoTPError):
    """A plan cannot be made, read, or used for this model."""


class SchemaError(AutoTPError):
    """A rewrite of a program does not give the fields that the next one reads: a fault of autotp."""


class RankError(AutoTPError):
    """The ranks disagree (models, inputs, versions), or there are no ranks where some are needed."""


class StateError(AutoTPError):
    """A state dict does not fit the module, or the module has no parameters yet."""


class RuleError(AutoTPError):
    """An operator rule contradicts the operator it describes."""


class CompareError(AutoTPError):
    """With `compare=`, a module's values or gradients on the ranks are not the original's; the message names it."""
