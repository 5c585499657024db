//! The paths of the node protocol.

use std::time::Duration;

use actix_web::body::BoxBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{AUTHORIZATION, CONTENT_TYPE};
use actix_web::middleware::{Next, from_fn};
use actix_web::web::{self, Data, Payload, Query, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;

use super::Beside;
use crate::http::body;
use crate::http::errors::ApiError;
use crate::keeper::feed::Reader;
use crate::wire::admit::{AdmitAnswer, LeaseCall, decode, decode_plain};
use crate::wire::events;
use crate::wire::info::KvRole;

/// Longest body of a call, in MiB: the hashes of a whole prompt.
const CALL_MIB: usize = 16;
/// Longest wait for one.
const CALL_WAIT: Duration = Duration::from_secs(10);

/// Mounts them; a [`Beside`] is the app's data.
pub fn configure(app: &mut ServiceConfig) {
    let paths = [
        ("/kvc/info", web::get().to(info)),
        ("/kvc/events", web::get().to(followed)),
        ("/admit_direct_append", web::post().to(admit)),
        ("/kvc/leases/release", web::post().to(release)),
        ("/kvc/leases/renew", web::post().to(renew)),
    ];
    for (path, route) in paths {
        app.service(web::resource(path).wrap(from_fn(keyed)).route(route));
    }
}

/// Only who shows the workers' key gets through.
async fn keyed(
    req: ServiceRequest,
    next: Next<BoxBody>,
) -> Result<ServiceResponse<BoxBody>, actix_web::Error> {
    let node = req.app_data::<Data<Beside>>();
    if node.is_some_and(|node| !node.is_shown_key(req.headers())) {
        return Err(ApiError::no_key(req.headers().contains_key(AUTHORIZATION)).into());
    }
    next.call(req).await
}

async fn info(node: Data<Beside>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(node.info().map_err(unavailable)?))
}

fn unavailable(why: String) -> ApiError {
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "engine_unavailable", why)
}

async fn admit(node: Data<Beside>, req: HttpRequest, payload: Payload) -> Result<HttpResponse, ApiError> {
    let info = node.info().map_err(unavailable)?;
    node.role(KvRole::Decode)?;
    if node.draining() {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "kvc_draining", "the node is draining"));
    }
    let content_type = req.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let plain = content_type.starts_with("application/json");
    let bytes = body::read(&req, payload, CALL_MIB, CALL_WAIT).await?;
    let (head, hashes) = if plain { decode_plain(&bytes) } else { decode(&bytes) }
        .map_err(|e| ApiError::bad_body(format!("admit request: {e}"), None))?;
    let answer = node.0.keeper.with(|books, now| {
        let request_id = head.request_id.clone();
        if books.epoch() != info.epoch {
            return AdmitAnswer::Stale;
        }
        // Of `input_len` the books keep what fits the chain: it is the gateway's estimate, the blocks are certain.
        match head.request(&hashes, books.ledger.residency()) {
            None => AdmitAnswer::Resend,
            Some(request) => AdmitAnswer::of(books.admit(request, now), &request_id, info.epoch, now),
        }
    });
    Ok(HttpResponse::Ok().json(answer.unwrap_or(AdmitAnswer::Stale)))
}

async fn release(node: Data<Beside>, req: HttpRequest, payload: Payload) -> Result<HttpResponse, ApiError> {
    lease(&node, &req, payload, |books, id, now| books.give_back(id, now)).await
}

async fn renew(node: Data<Beside>, req: HttpRequest, payload: Payload) -> Result<HttpResponse, ApiError> {
    lease(&node, &req, payload, |books, id, now| books.ledger.renew(id, now)).await
}

async fn lease(
    node: &Beside,
    req: &HttpRequest,
    payload: Payload,
    act: impl FnOnce(&mut crate::keeper::books::Books, &str, u64) -> bool,
) -> Result<HttpResponse, ApiError> {
    let bytes = body::read(req, payload, CALL_MIB, CALL_WAIT).await?;
    let call: LeaseCall =
        serde_json::from_slice(&bytes).map_err(|e| ApiError::bad_body(format!("lease call: {e}"), None))?;
    let known =
        node.0.keeper.with(|books, now| books.epoch() == call.epoch && act(books, &call.request_id, now));
    Ok(HttpResponse::Ok().json(json!({"known": known.unwrap_or(false)})))
}

#[derive(Debug, Deserialize)]
struct From {
    epoch: Option<u64>,
    after: Option<u64>,
}

async fn followed(node: Data<Beside>, from: Query<From>) -> Result<HttpResponse, ApiError> {
    let info = node.info().map_err(unavailable)?;
    let after = from.after.filter(|_| from.epoch == Some(info.epoch));
    let reader = Reader::new(node.0.keeper.clone(), after);
    let stream = stream::unfold(reader, |mut reader| async move {
        let piece = reader.next().await?;
        Some((Ok::<_, std::io::Error>(piece), reader))
    });
    Ok(HttpResponse::Ok().content_type(events::CONTENT_TYPE).streaming(Box::pin(stream)))
}
