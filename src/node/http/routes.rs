//! Which path does what.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use serde_json::json;
use subtle::ConstantTimeEq as _;

use crate::prompt::Api;
use crate::telemetry::gauge_text;
use crate::wire::plan::{PLAN_HEADER, Plan};

use super::super::error::NodeError;
use super::{App, Body, admit, events, full, generate, json, response};

/// Answers one request.
pub async fn handle(app: &Arc<App>, request: Request<Incoming>) -> Result<Response<Body>, NodeError> {
    let (head, body) = request.into_parts();
    let wanted = app.engine.config.key.as_deref();
    if wanted.is_some_and(|key| !shows(&head.headers, key)) {
        return Err(NodeError::unauthorized());
    }
    let path = head.uri.path();
    match path {
        "/health" | "/ready" | "/metrics" | "/kvc/info" | "/kvc/events" | "/kvc/d2p" | "/v1/models" => {
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
        "/metrics" => Ok(response(StatusCode::OK, "text/plain; version=0.0.4", full(metrics(app)))),
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

/// What the node holds and does, as Prometheus text.
fn metrics(app: &App) -> String {
    let (load, leases, sessions, backups) = app.engine.with(|s, _| {
        let sessions = s.ledger.residency().sessions().len();
        (s.ledger.load(), s.ledger.leases(), sessions, s.backups.tier.len())
    });
    let gauges = [
        ("kvc_node_kv_capacity_tokens", "KV pool", load.k_d as f64),
        ("kvc_node_kv_used_tokens", "What of it is taken", load.used as f64),
        ("kvc_node_kv_active_tokens", "What of it running turns hold", load.active as f64),
        ("kvc_node_running", "Turns running", f64::from(load.running)),
        ("kvc_node_waiting", "Turns waiting", f64::from(load.waiting)),
        ("kvc_node_queued_tokens", "Prompt tokens queued or being computed", load.queued_tokens as f64),
        ("kvc_node_leases", "Leases granted and not ended", leases as f64),
        ("kvc_node_sessions", "Sessions held", sessions as f64),
        ("kvc_node_backup_blocks", "Blocks in the backup tier", backups as f64),
        (
            "kvc_node_draining",
            "Whether it takes no new turns",
            f64::from(app.draining.load(Ordering::Relaxed)),
        ),
    ];
    let one = |(name, help, value)| gauge_text(name, help, [(String::new(), value)]);
    let mut text: String = gauges.into_iter().map(one).collect();
    if let Ok(serde_json::Value::Object(pushed)) = serde_json::to_value(app.engine.sync.figures()) {
        let samples =
            pushed.into_iter().filter_map(|(key, n)| Some((format!("count=\"{key}\""), n.as_f64()?)));
        text += &gauge_text("kvc_node_d2p", "D→P pushes so far", samples);
    }
    text
}

/// Whether a caller has the key; takes as long for a wrong one of the same length.
fn shows(headers: &HeaderMap, key: &str) -> bool {
    let shown = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    shown.is_some_and(|shown| shown.ct_eq(key.as_bytes()).into())
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

async fn read(app: &App, body: Incoming) -> Result<Bytes, NodeError> {
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
