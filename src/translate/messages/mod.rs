//! The Messages API.

mod content;
mod request;
mod voice;

use serde_json::json;

pub(super) use request::request;

use super::answer::error_text;

/// An engine's error body in this API's words.
pub(super) fn error(status: u16, body: &[u8]) -> Vec<u8> {
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        504 => "timeout_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error_text(body)}}).to_string().into_bytes()
}
