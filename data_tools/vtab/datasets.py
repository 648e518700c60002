"""The 16 source data sets of VTAB-1k: files and their URLs, numbers of images, and boundaries of the splits.

Sizes, checksums and counts are those of tensorflow_datasets 4.9.4, from which the official tasks are made.
"""

from dataclasses import dataclass

# In the official train list of SUN397, but undecodable, so that some copies omit it. No split of VTAB-1k contains it.
UNREADABLE = "/t/track/outdoor/sun_aophkoiosslinihb.jpg"


@dataclass(frozen=True)
class PublishedFile:
    """A published file. size: in bytes, 0 if not published. sha256: hex, "" if not published. url: may require a login."""

    name: str
    url: str
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class PoolSlice:
    """The part of a pool (a split of tensorflow_datasets) that begins at `percent` of it, in the order of the hash."""

    pool: str
    percent: int = 0

    def start(self, num_samples: int) -> int:
        """Position of the first sample in a pool of num_samples."""
        return self.percent * num_samples // 100


_VALIDATION, _TEST = PoolSlice("validation"), PoolSlice("test")


@dataclass(frozen=True)
class DataSet:
    """A source data set. name: name of its folder. counts: number of samples of each pool.

    tfds, tfds_major: folder in a data_dir of tensorflow_datasets, and major version that the official task uses. val: val200 is
    the first 200 samples of this part. test: all samples of this part. (train800 is always the beginning of `train`.)
    hint: how to get or use the files.
    """

    name: str
    files: tuple[PublishedFile, ...]
    counts: dict[str, int]
    tfds: str
    tfds_major: int
    val: PoolSlice = _VALIDATION
    test: PoolSlice = _TEST
    hint: str = ""


_KAGGLE = "https://www.kaggle.com/c/diabetic-retinopathy-detection/data"
_DSPRITES_STEM = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64"
_NORB_TRAIN, _NORB_TEST = "smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing"


def _files(base: str, *files: tuple[str, int, str]) -> tuple[PublishedFile, ...]:
    """Published files of one place. base: beginning of their URLs. files: (name, size, SHA-256) of each."""
    return tuple(PublishedFile(name, base + name, size, sha256) for name, size, sha256 in files)


_ALL = (
    DataSet(
        "caltech101",
        _files(
            "https://data.caltech.edu/records/mzrjq-6wc02/files/",
            ("caltech-101.zip", 137_414_764, "331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91"),
        ),
        {"train": 3060, "test": 6084},
        "caltech101",
        3,
        val=PoolSlice("train", 90),
        hint="the official 30 training images of each class are only in a prepared copy of tensorflow_datasets: see docs/vtab.md",
    ),
    DataSet(
        "cifar100",
        _files(
            "https://www.cs.toronto.edu/~kriz/",
            (
                "cifar-100-binary.tar.gz",
                168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        {"train": 50_000, "test": 10_000},
        "cifar100",
        3,
        val=PoolSlice("train", 90),
        hint="the binary version",
    ),
    DataSet(
        "dtd",
        _files(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/",
            ("dtd-r1.0.1.tar.gz", 625_239_812, "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205"),
        ),
        {"train": 1880, "validation": 1880, "test": 1880},
        "dtd",
        3,
    ),
    DataSet(
        "flowers102",
        _files(
            "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
            ("102flowers.tgz", 344_862_509, "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246"),
            ("imagelabels.mat", 502, "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d"),
            ("setid.mat", 14_989, "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd"),
        ),
        {"train": 1020, "validation": 1020, "test": 6149},
        "oxford_flowers102",
        2,
    ),
    DataSet(
        "pets",
        _files(
            "https://www.robots.ox.ac.uk/~vgg/data/pets/data/",
            ("images.tar.gz", 791_918_971, "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d"),
            ("annotations.tar.gz", 19_173_078, "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91"),
        ),
        {"train": 3680, "test": 3669},
        "oxford_iiit_pet",
        3,
        val=PoolSlice("train", 80),
    ),
    DataSet(
        "sun397",
        (
            *_files(
                "https://vision.princeton.edu/projects/2010/SUN/",
                ("SUN397.tar.gz", 39_077_296_924, "f404130965a7ad77bed5ececc71e720ab50f3cc1e1bb257257610d38f3b928ec"),
            ),
            *_files(
                "https://raw.githubusercontent.com/tensorflow/datasets/v4.9.4/tensorflow_datasets/image_classification/",
                ("sun397_tfds_tr.txt", 3_070_803, "764d9aa5c7b67a12b1a5ef784656a84f6a3a3cc0383ce9dc7acc59e3efd45791"),
                ("sun397_tfds_va.txt", 438_722, "0f5f5e56d4c10ea6dd64108980ce1fa3d0a5d92b61ef92530f34b6aa2dbaf192"),
                ("sun397_tfds_te.txt", 877_678, "e172ef48fe5e94e26b698b0cdc56d9e100ae072eeb44d2e9e9e5bc289337fccc"),
            ),
        ),
        {"train": 76_127, "validation": 10_875, "test": 21_750},
        "sun397/tfds",
        4,
        hint="the three lists are part of tensorflow_datasets; its wheel contains them, too (pip download --no-deps)",
    ),
    DataSet(
        "svhn",
        _files(
            "http://ufldl.stanford.edu/housenumbers/",
            ("train_32x32.mat", 182_040_794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
            ("test_32x32.mat", 64_275_384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
        ),
        {"train": 73_257, "test": 26_032},
        "svhn_cropped",
        3,
        val=PoolSlice("train", 90),
    ),
    DataSet(
        "patch_camelyon",
        _files(
            "https://zenodo.org/record/2546921/files/",
            *(
                (f"camelyonpatch_level_2_split_{name}.h5.gz", size, sha256)
                for name, size, sha256 in (
                    ("train_x", 6_421_353_462, "d619e741468a7ab35c7e4a75e6821b7e7e6c9411705d45708f2a0efc8960656c"),
                    ("train_y", 21_378, "b74126d2c01b20d3661f9b46765d29cf4e4fba6faba29c8e0d09d406331ab75a"),
                    ("valid_x", 805_965_320, "f82ee1670d027b4ec388048d9eabc2186b77c009655dae76d624c0ecb053ccb2"),
                    ("valid_y", 3038, "ce1ae30f08feb468447971cfd0472e7becd0ad96d877c64120c72571439ae48c"),
                    ("test_x", 800_875_929, "79174c2201ad521602a5888be8f36ee10875f37403dd3f2086caf2182ef87245"),
                    ("test_y", 3040, "0a522005fccc8bbd04c5a117bfaf81d8da2676f03a29d7499f71d0a0bd6068ef"),
                )
            ),
        ),
        {"train": 262_144, "validation": 32_768, "test": 32_768},
        "patch_camelyon",
        2,
    ),
    DataSet(
        "eurosat",
        _files(
            "http://madm.dfki.de/files/sentinel/",
            ("EuroSAT.zip", 94_280_567, "8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd"),
        ),
        {"train": 27_000},
        "eurosat/rgb",
        2,
        val=PoolSlice("train", 60),
        test=PoolSlice("train", 80),
    ),
    DataSet(
        "resisc45",
        (PublishedFile("NWPU-RESISC45.rar", "https://1drv.ms/u/s!AmgKYzARBl5ca3HNaHIlzp_IXjs"),),
        {"train": 31_500},
        "resisc45",
        3,
        val=PoolSlice("train", 60),
        test=PoolSlice("train", 80),
        hint="download it in a browser, and unpack the .rar (bsdtar -xf, or unrar x) to a folder NWPU-RESISC45",
    ),
    DataSet(
        "retinopathy",
        (
            PublishedFile("train.zip", _KAGGLE),
            PublishedFile("test.zip", _KAGGLE),
            PublishedFile("trainLabels.csv", _KAGGLE),
            *_files(
                "https://storage.googleapis.com/kaggle-forum-message-attachments/90528/2877/",
                (
                    "retinopathy_solution.csv",
                    1_181_257,
                    "a6af3d66804e81887da89b9261bcfb7da4f5bacedb070f1b5db83fa879ab60c9",
                ),
            ),
        ),
        {"train": 35_126, "validation": 10_906, "test": 42_670},
        "diabetic_retinopathy_detection/btgraham-300",
        3,
        hint="log in to Kaggle and accept the rules; join the parts (cat train.zip.00? > train.zip, 5 of them, and test.zip "
        "likewise, 7), and unzip trainLabels.csv.zip",
    ),
    DataSet(
        "clevr",
        _files(
            "https://dl.fbaipublicfiles.com/clevr/",
            ("CLEVR_v1.0.zip", 19_021_600_724, "5cd61cf1096ed20944df93c9adb31e74d189b8459a94f54ba00090e5c59936d1"),
        ),
        {"train": 70_000, "validation": 15_000},
        "clevr",
        3,
        val=PoolSlice("train", 90),
        test=_VALIDATION,
    ),
    DataSet(
        "dmlab",
        _files(
            "https://storage.googleapis.com/dmlab-vtab/",
            ("dmlab.tar.gz", 3_017_022_789, "638b18fa69a5d61bbc310cd0b87ac603a39f41de0fdb07b6e77de274a24480a4"),
        ),
        {"train": 65_550, "validation": 22_628, "test": 22_735},
        "dmlab",
        2,
    ),
    DataSet(
        "kitti",
        _files(
            "https://s3.eu-central-1.amazonaws.com/avg-kitti/",
            (
                "data_object_image_2.zip",
                12_569_945_557,
                "351c5a2aa0cd9238b50174a3a62b846bc5855da256b82a196431d60ff8d43617",
            ),
            ("data_object_label_2.zip", 5_601_213, "4efc76220d867e1c31bb980bbf8cbc02599f02a9cb4350effa98dbb04aaed880"),
            ("devkit_object.zip", 63_794, "ce0b76b69c0c5f89690a0d65b7302bbbdb962a0c7e8aba6efc7050d1b04b4cf1"),
        ),
        {"train": 6347, "validation": 423, "test": 711},
        "kitti",
        3,
    ),
    DataSet(
        "dsprites",
        _files(
            "https://github.com/google-deepmind/dsprites-dataset/raw/master/",
            (f"{_DSPRITES_STEM}.hdf5", 28_024_106, "729fa22e884c9c500e1f17415d580746b4c5894fbbb780a1319bbcfa39a745bb"),
        ),
        {"train": 737_280},
        "dsprites",
        2,
        val=PoolSlice("train", 80),
        test=PoolSlice("train", 90),
        hint=f"or {_DSPRITES_STEM}.npz from the same place, which has the same order",
    ),
    DataSet(
        "smallnorb",
        _files(
            "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
            (
                f"{_NORB_TRAIN}-dat.mat.gz",
                131_896_188,
                "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
            ),
            (f"{_NORB_TRAIN}-info.mat.gz", 71_052, "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32"),
            (
                f"{_NORB_TEST}-dat.mat.gz",
                130_799_817,
                "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
            ),
            (f"{_NORB_TEST}-info.mat.gz", 10_428, "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2"),
        ),
        {"train": 24_300, "test": 24_300},
        "smallnorb",
        2,
        val=_TEST,
        test=PoolSlice("test", 50),
    ),
)
DATASETS: dict[str, DataSet] = {dataset.name: dataset for dataset in _ALL}
