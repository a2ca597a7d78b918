"""The URLs and views of the Django project that the door's tests serve: see `apps_django_settings`.

Each view is at `/sync/...` and at `/async/...`; `?case=` names the runs of a test, and `GET /told?case=` counts them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from django.contrib.auth import login
from django.contrib.auth.models import Group, User
from django.db import transaction
from django.http import FileResponse, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.utils.safestring import mark_safe
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from ninja import Body, NinjaAPI
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from oncemore.web.django import current_operation, exempt, idempotent, optional, required

runs: Counter[str] = Counter()
lock = threading.Lock()


def count(request: HttpRequest) -> int:
    with lock:
        runs[request.GET.get("case", "")] += 1
        return runs[request.GET.get("case", "")]


# ── What the views do, told once for both kinds ───────────────────────────────────────────────────────────────────────


def create(request: HttpRequest, number: int) -> HttpResponse:
    answer = JsonResponse({"run": number, "key": current_operation().key}, status=201)
    answer.set_cookie("session", "secret")
    answer["Location"] = f"/orders/{number}"
    return answer


def fail(request: HttpRequest, number: int) -> HttpResponse:
    if number == 1:
        raise RuntimeError("The view fails")
    return HttpResponse("done", status=201)


def body(request: HttpRequest, number: int) -> HttpResponse:
    how = request.GET["how"]
    if how == "form":
        found: Any = {**request.POST.dict(), **{name: file.read().decode() for name, file in request.FILES.items()}}
    elif how == "read":
        found = request.read().decode()
    elif how == "lines":
        found = [line.decode() for line in request]
    else:
        found = request.body.decode()
    return JsonResponse({"found": found})


def file(request: HttpRequest, number: int) -> FileResponse:
    opened = tempfile.TemporaryFile()  # noqa: SIM115 (the response closes it)
    opened.write(b"x" * int(request.GET["size"]))
    opened.seek(0)
    return FileResponse(opened)


def redirect(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse(status=308, headers={"Location": f"/sync/create?{request.META['QUERY_STRING']}"})


def rendered(request: HttpRequest, number: int) -> HttpResponse:
    """Has headers that are marked as safe, as a template makes them."""
    return HttpResponse("done", status=201, headers={"Location": mark_safe(f"/orders/{number}")})


def die(request: HttpRequest, number: int) -> HttpResponse:
    os._exit(9)


versions: Counter[str] = Counter()
CONDITIONS = {"If-None-Match", "If-Modified-Since", "If-Unmodified-Since", "Range", "If-Range"}


def thing(request: HttpRequest, name: str) -> HttpResponse:
    if request.method == "PUT":
        count(request)
        versions[name] += 1
    if name == "none":
        return HttpResponse(status=404)
    if request.method == "GET" and CONDITIONS.intersection(request.headers):
        return HttpResponse(status=304)
    return HttpResponse(str(versions[name]), headers={"ETag": f'"v{versions[name]}"'})


ACTS: dict[str, Callable[[HttpRequest, int], Any]] = {
    "create": create,
    "fail": fail,
    "body": body,
    "small": body,
    "by-body": create,
    "rendered": rendered,
    "file": file,
    "redirect": redirect,
    "brief": die,
}


def sync_view(act: Callable[[HttpRequest, int], Any]) -> Callable[..., Any]:
    return csrf_exempt(lambda request: act(request, count(request)))


def async_view(act: Callable[[HttpRequest, int], Any]) -> Callable[..., Any]:
    async def view(request: HttpRequest) -> Any:
        await asyncio.sleep(0)
        return act(request, count(request))

    return transaction.non_atomic_requests(csrf_exempt(view))


# ── Streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────


STREAM = {"before": 0, "pause": 0, "many": 2, "size": 0}


@csrf_exempt
def stream(request: HttpRequest) -> StreamingHttpResponse:
    before, pause, many, size = (int(request.GET.get(name, usual)) for name, usual in STREAM.items())

    def chunks() -> Iterator[bytes]:
        for number in range(many):
            yield (b"%d " % number).ljust(size)
            time.sleep(pause / 1000)

    count(request)
    time.sleep(before / 1000)
    return StreamingHttpResponse(chunks())


@transaction.non_atomic_requests
@csrf_exempt
async def astream(request: HttpRequest) -> StreamingHttpResponse:
    before, pause, many, size = (int(request.GET.get(name, usual)) for name, usual in STREAM.items())

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(many):
            yield (b"%d " % number).ljust(size)
            await asyncio.sleep(pause / 1000)

    count(request)
    await asyncio.sleep(before / 1000)
    return StreamingHttpResponse(chunks())


# ── Slow views, whose client may leave ────────────────────────────────────────────────────────────────────────────────


@csrf_exempt
def slow(request: HttpRequest) -> HttpResponse:
    number = count(request)
    time.sleep(float(request.GET["pause"]))
    Group.objects.create(name=f"{request.GET['case']} {os.getpid()} {number}")
    return HttpResponse(f"done by {os.getpid()}", status=201)


@transaction.non_atomic_requests
@csrf_exempt
async def aslow(request: HttpRequest) -> HttpResponse:
    number = count(request)
    await asyncio.sleep(float(request.GET["pause"]))
    await Group.objects.acreate(name=f"{request.GET['case']} {os.getpid()} {number}")
    return HttpResponse(f"done by {os.getpid()}", status=201)


# ── Rules on views ────────────────────────────────────────────────────────────────────────────────────────────────────


def marked(request: HttpRequest, **params: Any) -> HttpResponse:
    return JsonResponse({"run": count(request), "params": {name: str(value) for name, value in params.items()}})


@required
@csrf_exempt
async def arequired(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"run": count(request)})


@method_decorator(csrf_exempt, name="dispatch")
class ByMethod(View):
    @method_decorator(required)
    def post(self, request: HttpRequest) -> HttpResponse:
        return marked(request)

    def put(self, request: HttpRequest) -> HttpResponse:
        return marked(request)

    @exempt
    def patch(self, request: HttpRequest) -> HttpResponse:
        return marked(request)


@method_decorator([csrf_exempt, required], name="dispatch")
class ByDispatch(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return marked(request)


@required
@method_decorator(csrf_exempt, name="dispatch")
class ByClass(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return marked(request)


@method_decorator(csrf_exempt, name="dispatch")
class Unmarked(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return marked(request)


class Rest(APIView):
    @required
    def post(self, request: Request) -> Response:
        return Response({"run": count(request), "got": request.data}, status=201)


@required
@api_view(["POST"])
def rest_function(request: Request) -> Response:
    return Response({"run": count(request), "got": request.data})


@api_view(["POST"])
@idempotent(key="required", name="lost")
def rest_lost(request: Request) -> Response:
    return Response({"run": count(request)})


class Orders(ViewSet):
    @required
    def create(self, request: Request) -> Response:
        return Response({"run": count(request), "got": request.data}, status=201)

    def destroy(self, request: Request, pk: str) -> Response:
        return Response({"run": count(request)})

    @idempotent(key="required", name="orders.capture", ttl="30d")
    @action(detail=True, methods=["post"])
    def capture(self, request: Request, pk: str) -> Response:
        return Response({"run": count(request), "pk": pk})


router = DefaultRouter()
router.register("orders", Orders, basename="orders")
api = NinjaAPI()


@api.post("/sync/{number}")
@idempotent(key="required", name="ninja.sync")
def ninja_sync(request: HttpRequest, number: int, got: dict[str, Any] = Body(...)) -> dict[str, Any]:  # noqa: B008
    return {"run": count(request), "number": number, "got": got}


@api.put("/sync/{number}")
def ninja_put(request: HttpRequest, number: int) -> dict[str, Any]:
    return {"run": count(request)}


@api.post("/async")
@required
async def ninja_async(request: HttpRequest) -> dict[str, Any]:
    return {"run": count(request), "key": current_operation().key}


# ── The database, users and forms ─────────────────────────────────────────────────────────────────────────────────────


@csrf_exempt
def atomic(request: HttpRequest) -> HttpResponse:
    """Fails after its effect, the first time."""
    number = count(request)
    Group.objects.create(name=f"{request.GET['case']} {number}")
    if number == 1:
        raise RuntimeError("The view fails")
    return HttpResponse("done", status=201)


@csrf_exempt
def log_in(request: HttpRequest) -> HttpResponse:
    login(request, User.objects.get_or_create(username=request.GET["user"])[0])
    return HttpResponse()


def form(request: HttpRequest) -> HttpResponse:
    """Requires a CSRF token."""
    return HttpResponse(str(count(request)))


def token(request: HttpRequest) -> HttpResponse:
    from django.middleware.csrf import get_token

    return HttpResponse(get_token(request))


def told(request: HttpRequest) -> JsonResponse:
    case = request.GET["case"]
    return JsonResponse({"runs": runs[case], "effects": Group.objects.filter(name__startswith=case).count()})


def views(wrap: Callable[[Callable[[HttpRequest, int], Any]], Callable[..., Any]]) -> list[Any]:
    return [path(name, wrap(act)) for name, act in ACTS.items()]


async def athing(request: HttpRequest, name: str) -> HttpResponse:
    return thing(request, name)


sync_urls = [
    *views(sync_view),
    path("thing/<name>", csrf_exempt(thing)),
    *(path(name, stream) for name in ("stream", "released", "buffered")),
    *(path(name, slow) for name in ("slow", "frozen")),
]
async_urls = [
    *views(async_view),
    path("thing/<name>", transaction.non_atomic_requests(csrf_exempt(athing))),
    *(path(name, astream) for name in ("stream", "released", "buffered")),
    *(path(name, aslow) for name in ("slow", "frozen")),
]
marked_urls = [
    path("function/<int:number>/", csrf_exempt(required(marked))),
    re_path(
        r"^regex/(?P<kind>in|out)(?:bound)?/$", csrf_exempt(idempotent(key="required")(lambda r, **p: marked(r, **p)))
    ),
    path("async", transaction.non_atomic_requests(arequired)),
    path("exempt", csrf_exempt(exempt(lambda request: marked(request)))),
    path("optional", csrf_exempt(optional(lambda request: marked(request)))),
    path("by-method", ByMethod.as_view()),
    path("by-dispatch", ByDispatch.as_view()),
    path("by-class", ByClass.as_view()),
    path("as-view", required(Unmarked.as_view())),
    path("rest", Rest.as_view()),
    path("rest-function", rest_function),
    path("rest-lost", rest_lost),
    path("", include(router.urls)),
]
ninja_urls = api.urls
for pattern in ninja_urls[0]:
    transaction.non_atomic_requests(pattern.callback)  # an async one may not be atomic
urlpatterns = [
    path("sync/", include(sync_urls)),
    path("async/", include(async_urls)),
    path("marked/", include(marked_urls)),
    path("ninja/", ninja_urls),
    path("atomic", atomic),
    path("log-in", log_in),
    path("form", form),
    path("token", token),
    path("told", told),
]
