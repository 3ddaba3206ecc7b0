"""Which images may be used for what, so that no guarantee rests on a network's training images."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hawkvision.cascade.certification.predictions import Split, split_indices
from hawkvision.cascade.certification.profile import ProfileData
from hawkvision.core.errors import ManifestError
from hawkvision.model_zoo.calibration.evidence import clean_images
from hawkvision.models.datasets import LabelledImages
from hawkvision.models.image_sets.labelled_images import copies_of
from hawkvision.models.manifest import Manifest, Training

SPLIT_SEED: Final = 2405
"""Seed of the zoo's own splits, and the default of `hawkvision calibrate`."""

_WITH_TEST: Final = (0.25, 0.75)
"""Shares of profile and certification images if there are test images, which alone are held out."""


def split_images(manifest: Manifest, images: LabelledImages, seed: int, *, fit_on_trained: bool = False) -> Split:
    """Divide images into profile, certification and held-out parts for that manifest's cascade.

    The file that the cascade was trained on is divided by `split_after_training`, any other by `split_indices`. Images
    of which the data set says that a model was trained on them are in no part; with `fit_on_trained` they are the
    profile part, and all others the certification part. Of copies of an image only the first is in a part. Training
    images that were repacked into another file are not recognised: never certify with them.

    Raises:
        ManifestError: if the manifest says that more images trained than there are.
    """
    training, trained = manifest.training, images.trained
    marked = trained is not None and bool(trained.any())
    if training is not None and training.data_sha256 == images.sha256 and not marked:
        return split_after_training(training, images, seed)
    clean = clean_images(images)
    if fit_on_trained and trained is not None and marked:
        return Split(np.flatnonzero(trained), clean, np.zeros(0, np.intp))
    parts = split_indices(images.sources[clean], seed)
    return Split(clean[parts.profile], clean[parts.certify], clean[parts.held_out])


def split_again(manifest: Manifest, images: LabelledImages, data: ProfileData) -> Split:
    """The split of a profile's own images, or of others in the same way.

    Raises:
        ManifestError: as `split_images`.
    """
    return split_images(manifest, images, data.seed, fit_on_trained=data.held_out == 0)


def split_after_training(training: Training, images: LabelledImages, seed: int) -> Split:
    """Divide a set that has trained a cascade. Training images and copies of any image are in no part.

    Test images, all of them, are held out. The others are divided by seed, with equal shares of every label: 25 %
    profile, 75 % certification; without test images 20 %, 50 %, and the rest held out.

    Raises:
        ManifestError: if fewer images may train than did.
    """
    trained = training_mask(images.is_test, training.images, training.seed)
    test = np.flatnonzero(images.is_test)
    first = copies_of(images.bodies)
    others = np.isin(first, first[trained | images.is_test])
    rest = np.flatnonzero(~others & (first == np.arange(len(first))))
    labels = images.labels[rest].astype(np.str_)
    parts = split_indices(labels, seed, _WITH_TEST) if len(test) else split_indices(labels, seed)
    return Split(rest[parts.profile], rest[parts.certify], test if len(test) else rest[parts.held_out])


def training_mask(is_test: NDArray[np.bool_], train: int, seed: int) -> NDArray[np.bool_]:
    """Which images train (n,): `train` of those that are no test images (n,), drawn with `seed`.

    Raises:
        ManifestError: if none would be left to certify with.
    """
    usable = np.flatnonzero(~is_test)
    if len(usable) <= train:
        raise ManifestError(f"{train} images are to train and some to certify, but only {len(usable)} exist")
    mask = np.zeros(len(is_test), np.bool_)
    mask[np.random.default_rng(seed).permutation(usable)[:train]] = True
    return mask
