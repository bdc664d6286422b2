"""Every error blendrag raises on purpose; each message is one sentence that ends with the remedy."""


class BlendError(Exception):
    """Base class of blendrag's own errors."""


class ConfigError(BlendError):
    """A setting is unknown, out of range, or contradicts another one."""


class PromptError(BlendError):
    """A prompt cannot be built or does not fit the model."""


class ModelError(BlendError):
    """vLLM cannot load the model, or the model has a property that blending does not support."""


class StoreError(BlendError):
    """The chunk store cannot be opened, read or written."""


class DocumentError(BlendError):
    """A document or a folder of documents cannot be read."""


class DatasetError(BlendError):
    """A data set of questions cannot be read, or an entry of it is not of the form that is expected."""


class EngineClosedError(BlendError):
    """The engine was closed, or died, before the request could finish."""


class InternalError(BlendError):
    """A fault of blendrag itself."""


class RequestError(PromptError):
    """A field of a client's request makes no sense; a server answers it with status 400.

    Attributes:
        param: the field, such as "documents" or "kv_transfer_params.blend.spans".
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
