//! What is not a turn: health, models, metrics, observable state.

use std::future::Ready;
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderValue};
use actix_web::web::{self, Data, Path, Query};
use actix_web::{FromRequest, HttpRequest, HttpResponse, Responder, ResponseError as _};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Local;
use super::backend::{Backend, FleetChange};
use super::body;
use super::errors::{ApiError, Dialect};
use super::front::Front;
use super::meter::Meter;
use crate::actors::slot::Role;
use crate::settings::is_base_url;
use crate::telemetry;

/// Largest body of an administrative request, and the time it may take.
const BODY_MAX_MIB: usize = 1;
const BODY_TIME: Duration = Duration::from_secs(10);

/// What stands before `/admin` and `/metrics`.
pub(super) struct Door {
    pub front: Arc<Front>,
    /// Whether only this machine reaches the listener.
    pub local: bool,
}

/// Proof that a request may see and change what is not API.
pub(super) struct Admin;

impl FromRequest for Admin {
    type Error = ApiError;
    type Future = Ready<Result<Self, ApiError>>;

    fn from_request(req: &HttpRequest, _: &mut Payload) -> Self::Future {
        let door = req.app_data::<Data<Door>>().ok_or_else(ApiError::not_found);
        let admitted = door.and_then(|door| door.front.access.admin(req.headers(), door.local));
        std::future::ready(admitted.map(|()| Self))
    }
}

/// `GET /health`: the process is alive.
pub(super) async fn health() -> impl Responder {
    HttpResponse::Ok().json(json!({"status": "ok"}))
}

/// `GET /ready`: requests can be served.
pub(super) async fn ready<B: Backend>(local: Data<Local<B>>) -> Result<HttpResponse, ApiError> {
    if local.backend.ready() {
        return Ok(HttpResponse::Ok().json(json!({"status": "ready"})));
    }
    let message = "No decode worker is up.";
    Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", message))
}

/// `GET /v1/models`: with the fields of both APIs that have such a list.
pub(super) async fn models<B: Backend>(
    req: HttpRequest,
    local: Data<Local<B>>,
) -> Result<HttpResponse, ApiError> {
    let _caller = local.front.access.caller(req.headers())?;
    let models: Vec<_> = local.backend.models().iter().map(|id| model_json(id)).collect();
    let end = |model: Option<&Value>| model.map(|model| model["id"].clone());
    let (first, last) = (end(models.first()), end(models.last()));
    Ok(HttpResponse::Ok().json(json!({"object": "list", "data": models, "has_more": false,
        "first_id": first, "last_id": last})))
}

/// `GET /v1/models/NAME`.
pub(super) async fn model<B: Backend>(
    req: HttpRequest,
    local: Data<Local<B>>,
    name: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let _caller = local.front.access.caller(req.headers())?;
    let known = local.backend.models().contains(&name);
    if known { Ok(HttpResponse::Ok().json(model_json(&name))) } else { Err(ApiError::model_not_found(&name)) }
}

fn model_json(id: &str) -> Value {
    json!({"id": id, "object": "model", "created": 0, "owned_by": "kvc-router",
        "type": "model", "display_name": id, "created_at": "1970-01-01T00:00:00Z"})
}

/// `GET /metrics`: Prometheus text.
pub(super) async fn metrics<B: Backend>(_: Admin, local: Data<Local<B>>) -> impl Responder {
    let text = telemetry::render() + &local.backend.metrics().await;
    HttpResponse::Ok().content_type("text/plain; version=0.0.4").body(text)
}

/// `GET /admin/sessions`.
pub(super) async fn sessions<B: Backend>(_: Admin, local: Data<Local<B>>) -> impl Responder {
    HttpResponse::Ok().json(local.backend.sessions().await)
}

/// `GET /admin/workers`.
pub(super) async fn workers<B: Backend>(_: Admin, local: Data<Local<B>>) -> impl Responder {
    HttpResponse::Ok().json(local.backend.workers().await)
}

/// A worker that joins.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Joining {
    url: String,
    role: Role,
    name: Option<String>,
}

/// `POST /admin/workers`: `{"url", "role", "name"?}` joins the fleet.
pub(super) async fn add_worker<B: Backend>(
    _: Admin,
    local: Data<Local<B>>,
    req: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let body = body::read(&req, payload, BODY_MAX_MIB, BODY_TIME).await?;
    let Joining { url, role, name } = json_body(&body, r#"{"url": "http://host:port", "role": "decode"}"#)?;
    let url = url.trim_end_matches('/').to_owned();
    if !is_base_url(&url) {
        return Err(ApiError::bad_body(
            "`url` must be a base URL such as \"http://10.0.0.5:8101\"",
            Some("url".into()),
        ));
    }
    if name.as_deref().is_some_and(|name| !is_name(name)) {
        return Err(ApiError::bad_body(
            "`name` must be 1 to 64 letters, digits, `-`, `_` or `.`",
            Some("name".into()),
        ));
    }
    let state = local.backend.change(FleetChange::Add { url, role, name }).await?;
    Ok(HttpResponse::Created().json(state))
}

/// How long a worker that leaves is waited for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Leaving {
    within_s: Option<u64>,
}

/// `DELETE /admin/workers/NAME[?within_s=N]`: it gets no new turns and leaves when what runs there has ended.
pub(super) async fn remove_worker<B: Backend>(
    _: Admin,
    local: Data<Local<B>>,
    name: Path<String>,
    req: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let leaving = Query::<Leaving>::from_query(req.query_string());
    let leaving =
        leaving.map_err(|e| ApiError::bad_body(format!("the query: {e}"), Some("within_s".into())))?;
    let seconds = leaving.within_s.unwrap_or_else(|| local.front.http().drain_s);
    let within = Duration::from_secs(seconds.min(86_400));
    let state = local.backend.change(FleetChange::Remove { name: name.into_inner(), within }).await?;
    Ok(HttpResponse::Accepted().json(state))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Draining {
    draining: bool,
}

/// `PATCH /admin/workers/NAME`: `{"draining": true}` sends it no new turns, `false` does again.
pub(super) async fn drain_worker<B: Backend>(
    _: Admin,
    local: Data<Local<B>>,
    name: Path<String>,
    req: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, ApiError> {
    let body = body::read(&req, payload, BODY_MAX_MIB, BODY_TIME).await?;
    let Draining { draining } = json_body(&body, r#"{"draining": true}"#)?;
    let change = FleetChange::Drain { name: name.into_inner(), draining };
    Ok(HttpResponse::Ok().json(local.backend.change(change).await?))
}

/// `POST /admin/reload`: reads the settings anew.
pub(super) async fn reload<B: Backend>(_: Admin, local: Data<Local<B>>) -> Result<HttpResponse, ApiError> {
    let changed = local.front.reload(&local.backend)?;
    Ok(HttpResponse::Ok().json(json!({"changed": changed})))
}

fn json_body<T: DeserializeOwned>(body: &[u8], expected: &str) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|e| ApiError::bad_body(format!("{e}; expected {expected}"), None))
}

fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=64).contains(&name.len()) && name.bytes().all(plain)
}

/// `GET /admin/explain/NAME`: a recorded decision, ready for `kvc-router explain`.
pub(super) async fn record<B: Backend>(
    _: Admin,
    local: Data<Local<B>>,
    name: Path<String>,
) -> Result<HttpResponse, ApiError> {
    local.backend.record(&name).map(|record| HttpResponse::Ok().json(record)).ok_or_else(ApiError::not_found)
}

/// `HEAD /api/hello`: Claude Code asks whether anybody is there.
pub(super) async fn hello() -> impl Responder {
    HttpResponse::Ok().finish()
}

/// `GET /v1/responses`: Codex first tries a WebSocket. Nothing else is served by GET there.
pub(super) async fn no_web_socket(req: HttpRequest) -> Result<HttpResponse, ApiError> {
    let upgrade = req.headers().get(header::UPGRADE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if !upgrade.split(',').any(|protocol| protocol.trim().eq_ignore_ascii_case("websocket")) {
        return wrong_method(req, "POST").await;
    }
    let mut response = ApiError::no_web_socket().error_response();
    // RFC 9110, 15.5.22: 426 names the protocol to use.
    response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("HTTP/1.1"));
    Ok(response)
}

/// Any other path.
pub(super) async fn not_found(req: HttpRequest) -> Result<HttpResponse, ApiError> {
    Err(counted(&req, ApiError::not_found()))
}

/// A known path with another method; `allow` names those it takes.
pub(super) async fn wrong_method(req: HttpRequest, allow: &'static str) -> Result<HttpResponse, ApiError> {
    let mut response = counted(&req, ApiError::wrong_method()).error_response();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
    Ok(response)
}

/// An error told in the words of the API whose path was asked for, and counted.
fn counted(req: &HttpRequest, error: ApiError) -> ApiError {
    if let Some(front) = req.app_data::<Data<Front>>() {
        Meter::begin(&front.tally).fails(&error);
    }
    let anthropic = req.path().contains("/v1/messages");
    error.spoken(if anthropic { Dialect::Anthropic } else { Dialect::OpenAi })
}
