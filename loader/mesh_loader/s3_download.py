"""Fetches a model from S3, or what speaks its protocol, through boto3.

Credentials, region, profile and endpoint are those of the AWS environment and configuration
(AWS_PROFILE, AWS_ENDPOINT_URL, ~/.aws, an instance's role): the endpoint is the operator's, at
whatever address it is, and any other host that a call is to go to must be within the reach.
`download` does the retries.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from mesh.domain.errors import MeshError, NotFound, TornModel, Unavailable, UnsupportedModel
from mesh.domain.model import WeightPrecision
from mesh.runtime.engine import Progress
from mesh_loader.disk import require_free
from mesh_loader.download import (
    PIECE_BYTES,
    Changed,
    Interrupted,
    Opened,
    Version,
    download,
    unpacked,
)
from mesh_loader.download_rate import DownloadRate
from mesh_loader.model_files import MODULE_CONFIGS, TEMPLATES, WANTED_PATTERNS
from mesh_loader.reach import Reach
from mesh_loader.sources import FILE_SUFFIXES, IR_XML, TAR_SUFFIXES, Prefix, not_held_as

CONNECT_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 60.0
CALL_TRIES_MAX = 4
"""How often boto3 tries one call, with its own pauses."""
OBJECTS_MAX = 1000
"""Right below a prefix; as many as one call lists."""
MODULES_MAX = 10
"""Folders of modules: their names begin with a digit."""

_OPENVINO = (IR_XML, "openvino_model.bin")
_NO_ACCESS = "give the node credentials that may read it: AWS_PROFILE, AWS_ACCESS_KEY_ID or a role"


def fetch_objects(
    source: Prefix,
    folder: Path,
    rate: DownloadRate,
    progress: Progress,
    reach: Reach,
    weights: WeightPrecision | None = None,
) -> Path:
    """The object's file, or the folder of what lies below the prefix, under `folder`.

    Raises NotFound, Unavailable, UnsupportedModel, also for an OpenVINO IR that is to be held in
    `weights`, InvalidInput for a host beyond the reach, and
    what `download` raises.
    """
    progress(f"look at s3://{source.bucket}/{source.key}", 0.0)
    try:
        client = _client(reach)
        listed = _listed(client, source)
        if source.key in listed:
            return _fetch_one(client, source, folder, rate, progress)
        if weights is not None and _below(source) + IR_XML in listed:
            raise not_held_as(f"s3://{source.bucket}/{source.key}", weights)
        return _fetch_folder(client, source, listed, folder, rate, progress)
    except (BotoCoreError, ClientError) as error:
        raise _plain_error(f"s3://{source.bucket}/{source.key}", error) from error


def _client(reach: Reach) -> Any:
    client = boto3.Session().client(
        "s3",
        config=Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": CALL_TRIES_MAX},
            # Not every server that speaks S3 has these checksums.
            response_checksum_validation="when_required",
        ),
    )
    own = urlsplit(client.meta.endpoint_url)

    def check(request: Any, **_: Any) -> None:
        # A bucket's name may become part of the host's, and an answer may name another region.
        parts = urlsplit(request.url)
        if parts.netloc != own.netloc:
            reach.check(
                parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            )

    client.meta.events.register("before-send.s3", check)
    return client


def _listed(client: Any, source: Prefix) -> dict[str, Version]:
    """The object that has the key, or else all right below it, and in their folders there the chat
    templates and the configurations of modules, by key.
    """
    if source.key.lower().endswith(FILE_SUFFIXES):
        answer = client.head_object(Bucket=source.bucket, Key=source.key)
        return {source.key: _version(answer, answer["ContentLength"])}
    below = _below(source)
    listed, folders = _listed_below(client, source.bucket, below)
    if f"{below}{TEMPLATES}/" in folders:
        templates, _ = _listed_below(client, source.bucket, f"{below}{TEMPLATES}/")
        listed |= {key: one for key, one in templates.items() if key.endswith(".jinja")}
    modules = [one for one in sorted(folders) if _is_module(one.removeprefix(below))]
    if len(modules) > MODULES_MAX:
        raise UnsupportedModel(
            f"s3://{source.bucket}/{below} holds {len(modules)} folders of modules; {MODULES_MAX} "
            "are the limit",
            hint="name the folder of one model",
        )
    for module in modules:
        configs, _ = _listed_below(client, source.bucket, module)
        listed |= {key: one for key, one in configs.items() if key == f"{module}config.json"}
    return listed


def _is_module(folder: str) -> bool:
    return PurePosixPath(f"{folder}config.json").match(MODULE_CONFIGS)


def _below(source: Prefix) -> str:
    """What the keys of the objects in the folder begin with."""
    return f"{source.key}/" if source.key else ""


def _listed_below(client: Any, bucket: str, below: str) -> tuple[dict[str, Version], set[str]]:
    """The objects right below, by key, and the folders there. Raises UnsupportedModel."""
    answer = client.list_objects_v2(Bucket=bucket, Prefix=below, Delimiter="/", MaxKeys=OBJECTS_MAX)
    if answer.get("IsTruncated"):
        raise UnsupportedModel(
            f"s3://{bucket}/{below} holds more than {OBJECTS_MAX} objects",
            hint="name the folder of one model",
        )
    listed = {one["Key"]: _version(one, one["Size"]) for one in answer.get("Contents", ())}
    return listed, {one["Prefix"] for one in answer.get("CommonPrefixes", ())}


def _fetch_one(
    client: Any, source: Prefix, folder: Path, rate: DownloadRate, progress: Progress
) -> Path:
    target = folder / PurePosixPath(source.key).name
    download(_Object(client, source.bucket, source.key), target, rate, progress)
    if target.name.lower().endswith(TAR_SUFFIXES):
        return unpacked(target, folder / "unpacked", progress)
    return target


def _fetch_folder(
    client: Any,
    source: Prefix,
    listed: dict[str, Version],
    folder: Path,
    rate: DownloadRate,
    progress: Progress,
) -> Path:
    where = f"s3://{source.bucket}/{source.key}".rstrip("/")
    names = {key: key.removeprefix(_below(source)) for key in listed}
    wanted = {
        key: name
        for key, name in sorted(names.items())
        if any(PurePosixPath(name).match(pattern) for pattern in (*WANTED_PATTERNS, *_OPENVINO))
    }
    ggufs = sorted(name for name in names.values() if name.lower().endswith(".gguf"))
    if ggufs and not any(name.endswith(".safetensors") for name in names.values()):
        raise UnsupportedModel(
            f"{where} holds GGUF files, of which one must be named",
            hint=f"for instance {where}/{ggufs[0]}",
        )
    if not wanted:
        raise NotFound(
            f"{where} holds no file of a model right below it",
            hint="check bucket and prefix: aws s3 ls " + where + "/",
        )
    target = _folder_of({key: listed[key] for key in wanted}, folder)
    missing = [key for key, name in wanted.items() if not (target / name).exists()]
    missing_bytes = sum(listed[key].size_bytes or 0 for key in missing)
    require_free(folder, missing_bytes, f"the copy of {where}")
    for key in missing:
        (target / wanted[key]).parent.mkdir(exist_ok=True)
        remote = _Object(client, source.bucket, key, listed[key])
        download(remote, target / wanted[key], rate, progress)
    return target


def _folder_of(wanted: dict[str, Version], folder: Path) -> Path:
    """Where these versions go, and what an earlier import has of them lies. What it has of a folder
    that was another then is removed: files of two models must never stand beside each other.
    """
    told = json.dumps([(key, *astuple(version)) for key, version in wanted.items()])
    target = folder / f"objects-{sha256(told.encode()).hexdigest()[:16]}"
    for other in folder.glob("objects-*"):
        if other != target:
            shutil.rmtree(other)
    target.mkdir(exist_ok=True)
    return target


class _Object:
    """One object; see RemoteFile."""

    def __init__(self, client: Any, bucket: str, key: str, listed: Version | None = None) -> None:
        """`listed`: the only version that is wanted."""
        self._client, self._bucket, self._key, self._listed = client, bucket, key, listed
        self.name = PurePosixPath(key).name

    @contextmanager
    def open(self, begin_bytes: int, part_of: Version | None) -> Iterator[Opened]:
        where: dict[str, str] = {}
        if part_of is not None:
            where = {"Range": f"bytes={begin_bytes}-", "IfMatch": part_of.tag}
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key, **where)
        except ClientError as error:
            if part_of is not None and _status(error) in (412, 416):
                raise Changed("the bucket has another version of it") from error
            if _status(error) >= 500:
                raise Interrupted(f"the server answered {_status(error)}") from error
            raise
        except SSLError:
            raise
        except (HTTPClientError, BotoConnectionError) as error:
            raise Interrupted(f"no answer ({type(error).__name__})") from error
        with closing(answer["Body"]) as body:
            if part_of is None:
                version = _version(answer, answer["ContentLength"])
                if self._listed not in (None, version):
                    raise TornModel(
                        f"{self.name} changed while its folder was fetched: {self._listed} was "
                        f"listed, {version} is there",
                        hint="fetch it again when nothing writes to the folder",
                    )
                yield Opened(version=version, begin_bytes=0, pieces=_pieces(body))
            elif answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                raise Changed("the server sends it as a whole only")
            else:
                yield Opened(version=part_of, begin_bytes=begin_bytes, pieces=_pieces(body))


def _pieces(body: Any) -> Iterator[bytes]:
    try:
        yield from body.iter_chunks(PIECE_BYTES)
    except (HTTPClientError, IncompleteReadError):
        raise Interrupted("the connection broke off") from None


def _version(said: Any, size_bytes: int) -> Version:
    return Version(size_bytes=size_bytes, tag=said.get("ETag", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _plain_error(where: str, error: BotoCoreError | ClientError) -> MeshError:
    if isinstance(error, NoCredentialsError):
        return Unavailable(f"{where} cannot be fetched without AWS credentials", hint=_NO_ACCESS)
    if not isinstance(error, ClientError):
        # Its text may name the endpoint, never a secret.
        return Unavailable(
            f"{where} cannot be reached: {error}",
            hint="check the network, AWS_REGION and AWS_ENDPOINT_URL on the node",
        )
    code, status = error.response.get("Error", {}).get("Code", ""), _status(error)
    if code == "NoSuchBucket":
        return NotFound(f"{where}: there is no such bucket", hint="check the bucket's name")
    if status == 404:
        return NotFound(f"{where}: there is no such object", hint="check bucket and key")
    if status in (401, 403):
        return Unavailable(
            f"{where} may not be read: the server answered {status} {code}".rstrip(),
            hint=_NO_ACCESS,
        )
    return Unavailable(
        f"{where} cannot be fetched: the server answered {status} {code}".rstrip(),
        hint="check AWS_REGION and AWS_ENDPOINT_URL on the node, and try again",
    )
