"""The model zoo: short, readable networks with the standard names, for planning and for tests."""

# Plain strings, so that listing the zoo does not pay for importing torch.
ZOO: dict[str, str] = {
    "gpt2_small": "models.gpt:gpt2_small",
    "gpt2_medium": "models.gpt:gpt2_medium",
    "gpt2_large": "models.gpt:gpt2_large",
    "gpt2_xl": "models.gpt:gpt2_xl",
    "gpt_tiny": "models.gpt:gpt_tiny",
    "llama2_7b": "models.llama:llama2_7b",
    "llama2_70b": "models.llama:llama2_70b",
    "llama_tiny": "models.llama:llama_tiny",
    "vgg16": "models.vgg:vgg16",
    "vgg19": "models.vgg:vgg19",
    "vgg_tiny": "models.vgg:vgg_tiny",
    "resnet50": "models.resnet:resnet50",
    "resnet101": "models.resnet:resnet101",
    "resnet_tiny": "models.resnet:resnet_tiny",
    "unet": "models.unet:unet",
    "unet_tiny": "models.unet:unet_tiny",
}
