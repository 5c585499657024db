//! What is not a turn: health, models, metrics, observable state.

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderValue};
use actix_web::web::{Data, Path};
use actix_web::{HttpRequest, HttpResponse, Responder, ResponseError as _};
use serde_json::{Value, json};

use super::Local;
use super::backend::Backend;
use super::errors::{ApiError, Dialect};
use crate::telemetry;

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
pub(super) async fn models<B: Backend>(local: Data<Local<B>>) -> impl Responder {
    let models: Vec<_> = local.backend.models().iter().map(|id| model_json(id)).collect();
    let end = |model: Option<&Value>| model.map(|model| model["id"].clone());
    let (first, last) = (end(models.first()), end(models.last()));
    HttpResponse::Ok().json(json!({"object": "list", "data": models, "has_more": false,
        "first_id": first, "last_id": last}))
}

/// `GET /v1/models/NAME`.
pub(super) async fn model<B: Backend>(
    local: Data<Local<B>>,
    name: Path<String>,
) -> Result<HttpResponse, ApiError> {
    let known = local.backend.models().contains(&name);
    if known { Ok(HttpResponse::Ok().json(model_json(&name))) } else { Err(ApiError::model_not_found(&name)) }
}

fn model_json(id: &str) -> Value {
    json!({"id": id, "object": "model", "created": 0, "owned_by": "kvc-router",
        "type": "model", "display_name": id, "created_at": "1970-01-01T00:00:00Z"})
}

/// `GET /metrics`: Prometheus text.
pub(super) async fn metrics() -> impl Responder {
    HttpResponse::Ok().content_type("text/plain; version=0.0.4").body(telemetry::render())
}

/// `GET /admin/sessions`.
pub(super) async fn sessions<B: Backend>(local: Data<Local<B>>) -> impl Responder {
    HttpResponse::Ok().json(local.backend.sessions().await)
}

/// `GET /admin/workers`.
pub(super) async fn workers<B: Backend>(local: Data<Local<B>>) -> impl Responder {
    HttpResponse::Ok().json(local.backend.workers().await)
}

/// `GET /admin/explain/NAME`: a recorded decision, ready for `kvc-router explain`.
pub(super) async fn record<B: Backend>(
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
        return Err(ApiError::wrong_method());
    }
    let mut response = ApiError::no_web_socket().error_response();
    // RFC 9110, 15.5.22: 426 names the protocol to use.
    response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("HTTP/1.1"));
    Ok(response)
}

/// Any other path.
pub(super) async fn not_found() -> Result<HttpResponse, ApiError> {
    Err(ApiError::not_found())
}

/// A known path with another method.
pub(super) async fn wrong_method(req: HttpRequest) -> Result<HttpResponse, ApiError> {
    let anthropic = req.path().contains("/v1/messages");
    let dialect = if anthropic { Dialect::Anthropic } else { Dialect::OpenAi };
    Err(ApiError::wrong_method().spoken(dialect))
}
