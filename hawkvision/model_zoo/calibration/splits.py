"""Which pictures may be used for what, so that no promise rests on pictures that a network has learnt by heart."""

from __future__ import annotations

from typing import Final

import numpy as np

from hawkvision.cascade.certification.profiling import Split, split_indices
from hawkvision.model_zoo.training.recipe import Pictures, training_mask
from hawkvision.models.datasets import LabelledPictures
from hawkvision.models.manifest import Manifest, Training

SPLIT_SEED: Final = 2405
"""Of the split behind the zoo's own temperatures and accuracies, and the default of `hawkvision calibrate`."""

_WITH_TEST: Final = (0.25, 0.75)
"""Shares of profile and certification pictures where test pictures exist: those alone are held out."""


def split_pictures(manifest: Manifest, pictures: LabelledPictures, seed: int) -> Split:
    """Divide pictures into profile, certification and held-out parts for that manifest's ladder.

    If the ladder was trained on this very file, as `split_after_training`. Any other file is divided by
    `split_indices`: what of it the networks have seen cannot be known here, so certify with pictures of your own,
    never with repacked training pictures.

    Raises:
        ManifestError: if the manifest says that more pictures trained than there are.
    """
    training = manifest.training
    if training is None or training.data_sha256 != pictures.sha256:
        return split_indices(pictures.sources, seed)
    return split_after_training(training, pictures, seed)


def split_after_training(training: Training, pictures: LabelledPictures, seed: int) -> Split:
    """Divide the pictures of which some trained a ladder: those are in no part.

    Test pictures, all of them, are held out. The others are divided by seed, with equal shares of every label: 25 %
    profile, 75 % certification; without test pictures 20 %, 50 %, and the rest held out.

    Raises:
        ManifestError: if fewer pictures may train than did.
    """
    trained = training_mask(pictures.is_test, Pictures(train=training.pictures, seed=training.seed))
    test = np.flatnonzero(pictures.is_test)
    rest = np.flatnonzero(~trained & ~pictures.is_test)
    labels = pictures.labels[rest].astype(np.str_)
    parts = split_indices(labels, seed, _WITH_TEST) if len(test) else split_indices(labels, seed)
    return Split(rest[parts.profile], rest[parts.certify], test if len(test) else rest[parts.held_out])
