"""Builds the model of a configuration."""

from pipeline.architecture.config import Config, ResNetConfig
from pipeline.model.masked import MaskedViT
from pipeline.model.resnet import ResNet
from pipeline.model.vit import VisionTransformer

Model = VisionTransformer | ResNet


def build(config: Config, seed: int = 0) -> Model:
    """A new model of this configuration; `create` builds one by name."""
    if isinstance(config, ResNetConfig):
        return ResNet(config, seed)
    return MaskedViT(config, seed) if config.masked else VisionTransformer(config, seed)
