//! Reads a request body: whole, bounded in size and time, as it came.

use std::time::Duration;

use actix_web::HttpRequest;
use actix_web::http::header;
use actix_web::web::Payload;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;

use super::errors::ApiError;
use super::wire::Peer;

/// Room made for a body on its announced length alone; the rest when its bytes come.
const TRUSTED: usize = 1 << 20;

/// Reads the body of `req`, at most `limit_mib` MiB of it, within `within`.
pub(crate) async fn read(
    req: &HttpRequest,
    mut payload: Payload,
    limit_mib: usize,
    within: Duration,
) -> Result<Bytes, ApiError> {
    let encoding = req.headers().get(header::CONTENT_ENCODING);
    if encoding.is_some_and(|e| !e.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(ApiError::encoded_body());
    }
    let announced = req.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    let limit = limit_mib << 20;
    if announced.is_some_and(|length: usize| length > limit) {
        return Err(ApiError::body_too_large(limit_mib));
    }
    // In an embedder's server nobody knows: the usual reason is that the client left.
    let here = || req.conn_data::<Peer>().is_some_and(|peer| !peer.is_gone());
    let collect = collect(&mut payload, announced, limit);
    match tokio::time::timeout(within, collect).await {
        Err(_) => Err(ApiError::body_timeout()),
        Ok(Err(Stopped::Incomplete)) if here() => Err(ApiError::body_malformed()),
        Ok(Err(Stopped::Incomplete)) => Err(ApiError::body_incomplete()),
        Ok(Err(Stopped::TooLarge)) => Err(ApiError::body_too_large(limit_mib)),
        Ok(Ok(body)) => Ok(body),
    }
}

enum Stopped {
    Incomplete,
    TooLarge,
}

async fn collect(payload: &mut Payload, announced: Option<usize>, limit: usize) -> Result<Bytes, Stopped> {
    let mut body = BytesMut::new();
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|_| Stopped::Incomplete)?;
        if body.is_empty() {
            if announced == Some(chunk.len()) {
                return Ok(chunk); // the usual small request: no copy
            }
            body.reserve(announced.unwrap_or(0).clamp(chunk.len(), TRUSTED.max(chunk.len())));
        }
        if body.len() + chunk.len() > limit {
            return Err(Stopped::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}
