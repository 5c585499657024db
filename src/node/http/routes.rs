//! Which path does what.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Body as HttpBody;
use serde_json::json;

use crate::prompt::Api;
use crate::wire::plan::{PLAN_HEADER, Plan};

use super::super::error::NodeError;
use super::{App, Body, admit, events, full, generate, json, response};

/// Answers one request.
pub async fn handle<B>(app: &Arc<App>, request: Request<B>) -> Result<Response<Body>, NodeError>
where
    B: HttpBody<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    match path {
        "/health" | "/ready" | "/kvc/info" | "/kvc/events" | "/kvc/d2p" | "/v1/models" => {
            only(&head.method, &Method::GET)?;
        }
        "/admit_direct_append"
        | "/kvc/leases/release"
        | "/kvc/leases/renew"
        | "/v1/chat/completions"
        | "/v1/completions"
        | "/v1/responses"
        | "/v1/messages"
        | "/v1/messages/count_tokens" => only(&head.method, &Method::POST)?,
        _ => return Err(NodeError::not_found("not_found", format!("no such path: {path}"))),
    }
    match path {
        "/health" => json(&json!({"status": "ok"})),
        "/ready" => Ok(ready(app)),
        "/kvc/info" => json(&app.info),
        "/kvc/events" => events::stream(app, head.uri.query()),
        "/kvc/d2p" => {
            let tier = app.engine.with(|s, _| s.backups.tier.len());
            json(&json!({"pushed": app.engine.sync.figures(), "backup_blocks": tier}))
        }
        "/v1/models" => {
            let model = json!({"id": app.info.model, "object": "model", "owned_by": "kvc-router"});
            json(&json!({"object": "list", "data": [model]}))
        }
        "/admit_direct_append" => admit::admit(app, &read(app, body).await?, is_json(&head.headers)),
        "/kvc/leases/release" => admit::lease(app, &read(app, body).await?, admit::LeaseAction::Release),
        "/kvc/leases/renew" => admit::lease(app, &read(app, body).await?, admit::LeaseAction::Renew),
        "/v1/messages/count_tokens" => generate::count_tokens(app, &read(app, body).await?),
        _ => {
            let api = Api::from_path(path).unwrap_or(Api::Chat);
            let plan = plan(&head.headers)?;
            let body = read(app, body).await?;
            generate::generate(app, api, body, plan).await
        }
    }
}

fn only(method: &Method, allowed: &Method) -> Result<(), NodeError> {
    if method == allowed { Ok(()) } else { Err(NodeError::method()) }
}

fn ready(app: &App) -> Response<Body> {
    if app.draining.load(Ordering::Relaxed) {
        let body = full(r#"{"status":"draining"}"#);
        return response(StatusCode::SERVICE_UNAVAILABLE, "application/json", body);
    }
    response(StatusCode::OK, "application/json", full(r#"{"status":"ready"}"#))
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    content_type.starts_with("application/json")
}

fn plan(headers: &HeaderMap) -> Result<Option<Plan>, NodeError> {
    let Some(value) = headers.get(PLAN_HEADER) else { return Ok(None) };
    let plan = serde_json::from_slice(value.as_bytes());
    plan.map(Some).map_err(|e| NodeError::bad_request(format!("{PLAN_HEADER}: {e}")))
}

async fn read<B>(app: &App, body: B) -> Result<Bytes, NodeError>
where
    B: HttpBody<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
{
    let most = app.engine.config.limits.body_bytes;
    match Limited::new(body, most).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let message = format!("the request body is over {most} bytes");
            Err(NodeError::too_large("body_too_large", message))
        }
        Err(error) => Err(NodeError::bad_request(format!("the request body ended early: {error}"))),
    }
}
