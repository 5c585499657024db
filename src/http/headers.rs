//! Which headers pass the gateway, in both directions.

use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};

use super::hint;
use crate::engines::client::Request;
use crate::sessions::{self, Headers};

/// How the turn is served: `direct`, `seed`, `reseed`, `fallback`, `rejected`, `failed`.
pub const MODE: HeaderName = HeaderName::from_static("x-kvc-mode");
/// Why: the rung of the ladder, or an error's code.
pub const REASON: HeaderName = HeaderName::from_static("x-kvc-reason");
/// Name of the decode worker.
pub const WORKER: HeaderName = HeaderName::from_static("x-kvc-worker");
/// The session, as the client may know it.
pub const SESSION: HeaderName = HeaderName::from_static("x-kvc-session");
/// How often the turn was placed anew after a failure; absent when never.
pub const REPLACED: HeaderName = HeaderName::from_static("x-kvc-replaced");
/// Types of the tools that were left out of a translated request, by commas; absent when none.
pub const DROPPED: HeaderName = HeaderName::from_static("x-kvc-dropped-tools");
/// Request header `1`: record this turn's decision. Response header: the record's name under `/admin/explain/`.
pub const EXPLAIN: HeaderName = HeaderName::from_static("x-kvc-explain");

/// Everything under this prefix is internal: never passed from a client to a worker or back.
const INTERNAL: &str = "x-kvc-";

/// Copies what a worker may see of a client's headers, in order and repeated ones as they are. `own`: what it showed is
/// a key of this gateway's and no worker's business, or workers are shown another.
pub(super) fn forward(from: &HeaderMap, own: bool, to: &mut Request) {
    let connection = connection_tokens(from.get_all(header::CONNECTION));
    for (name, value) in from {
        let key = own && (name == header::AUTHORIZATION || name.as_str() == "x-api-key");
        if !stays(name, &connection) && !is_ours(name) && !key {
            to.header(name, value);
        }
    }
}

/// Whether a request comes from Codex.
pub(super) fn is_codex(headers: &HeaderMap) -> bool {
    let headers: Vec<(&str, &[u8])> =
        headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    sessions::is_codex(Headers(&headers))
}

/// Anthropic's `x-api-key` in the words of the other APIs, unless the client speaks both.
pub(super) fn as_bearer(from: &HeaderMap, to: &mut Request) {
    let key = from.get("x-api-key").and_then(|key| key.to_str().ok());
    let bearer = key.and_then(|key| value(&format!("Bearer {key}")));
    if let Some(bearer) = bearer.filter(|_| !from.contains_key(header::AUTHORIZATION)) {
        to.header(&header::AUTHORIZATION, &bearer);
    }
}

/// Request headers this gateway sets or answers itself. An id of the client's would collide with the
/// attempt's, and a compressed answer could not be read in passing.
fn is_ours(name: &HeaderName) -> bool {
    [header::HOST, header::CONTENT_LENGTH, header::EXPECT, header::ACCEPT_ENCODING].contains(name)
        || matches!(name.as_str(), "x-request-id" | hint::HEADER)
}

/// Whether a worker's header belongs in the answer.
pub(super) fn passes_back(name: &HeaderName, connection: &[String]) -> bool {
    !stays(name, connection) && name != header::CONTENT_LENGTH
}

/// Header names that a `Connection` header ties to its hop.
pub(super) fn connection_tokens<'a>(values: impl Iterator<Item = &'a HeaderValue>) -> Vec<String> {
    let values = values.filter_map(|v| v.to_str().ok());
    values.flat_map(|v| v.split(',')).map(|t| t.trim().to_ascii_lowercase()).collect()
}

/// Whether a header stays on its own hop (RFC 9110, 7.6.1) or inside.
fn stays(name: &HeaderName, connection: &[String]) -> bool {
    const HOP: [HeaderName; 7] = [
        header::CONNECTION,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ];
    HOP.contains(name)
        || matches!(name.as_str(), "keep-alive" | "proxy-connection")
        || name.as_str().starts_with(INTERNAL)
        || connection.iter().any(|token| token == name.as_str())
}

/// A header value from a text of ours; nothing when it has bytes a header cannot carry.
pub(super) fn value(text: &str) -> Option<HeaderValue> {
    HeaderValue::from_str(text).ok()
}
