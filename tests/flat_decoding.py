"""`generate` with every choice as an argument of its own, so that a test names the one that it changes."""

from jaxpar import decode, lm
from jaxpar.decode import Constraints, Decoding, Prompts, Sampling


def generate(key, params, prompt, model, sampling=Sampling(), **options):
    """Texts of any model."""
    return decode.generate(key, params, *parts_of(prompt, model, sampling, options), **options)


def lm_generate(key, params, prompt, config, sampling=Sampling(), **options):
    """Texts of a language model."""
    return lm.generate(key, params, *parts_of(prompt, config, sampling, options), **options)


def parts_of(prompt, model, sampling, options):
    """The arguments after the parameters; takes out of `options` what they hold."""
    lengths, seeds = options.pop("prompt_lengths", None), options.pop("seeds", None)
    constraints = {name: options.pop(name) for name in Constraints._fields if name in options}
    names = Decoding.__dataclass_fields__
    decoding = Decoding(**{name: options.pop(name) for name in names if name in options})
    return Prompts(prompt, lengths, seeds), model, sampling, decoding, Constraints(**constraints)
