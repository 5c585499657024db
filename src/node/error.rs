//! What a node answers when it does not serve a request: an error body in the API's form with the right status.

use std::borrow::Cow;

use http::StatusCode;
use serde_json::json;

use crate::prompt::{Api, BadBody};

/// A request that is not served. Nothing of it stays behind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct NodeError {
    /// HTTP status.
    pub status: StatusCode,
    /// Stable machine-readable code.
    pub code: &'static str,
    /// For people.
    pub message: String,
    /// The field at fault.
    pub param: Option<Cow<'static, str>>,
    /// `Retry-After` in seconds.
    pub retry_after: Option<u32>,
}

impl NodeError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), param: None, retry_after: None }
    }

    /// 400: the request itself is wrong.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// 400: a field of the body is wrong.
    pub fn bad_field(param: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(Cow::Borrowed(param)), ..Self::bad_request(message) }
    }

    /// 404: no such path or model.
    pub fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, code, message)
    }

    /// 405.
    pub fn method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this path has another method")
    }

    /// 409: the plan relies on a lease or blocks this node does not have.
    pub fn plan_mismatch(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "kvc_plan_mismatch", message)
    }

    /// 413: longer than the whole pool, or than a body may be.
    pub fn too_large(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, code, message)
    }

    /// 429: no room within the deadline, or the queue is full.
    pub fn busy(message: impl Into<String>) -> Self {
        Self { retry_after: Some(1), ..Self::new(StatusCode::TOO_MANY_REQUESTS, "kvc_busy", message) }
    }

    /// 401: the caller did not show this worker's key.
    pub fn unauthorized() -> Self {
        let message = "this worker's key is needed: `Authorization: Bearer KEY` (fleet.worker_key)";
        Self::new(StatusCode::UNAUTHORIZED, "kvc_unauthorized", message)
    }

    /// 503: the node is about to stop.
    pub fn draining() -> Self {
        let message = "this worker takes no new turns";
        Self { retry_after: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "kvc_draining", message) }
    }

    /// 502: the KV did not arrive, or did not get there.
    pub fn transfer(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "kvc_transfer_failed", message)
    }

    /// 403: this node does not have the role the plan needs.
    pub fn role(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "kvc_role", message)
    }

    /// 500: a bug; the message says which rule was broken.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// `{"error":{message,type,code}}`, and `"type":"error"` around it in the Messages API. The code is what a
    /// gateway acts on, so it is there in every API.
    pub fn body(&self, api: Option<Api>) -> String {
        let anthropic = api == Some(Api::Messages);
        let kind = match self.status.as_u16() {
            404 if anthropic => "not_found_error",
            413 if anthropic => "request_too_large",
            429 => "rate_limit_error",
            503 if anthropic => "overloaded_error",
            400..=499 => "invalid_request_error",
            _ if anthropic => "api_error",
            _ => "server_error",
        };
        let mut body = json!({"error": {"message": self.message, "type": kind, "code": self.code}});
        if let Some(param) = self.param.as_deref().filter(|_| !anthropic) {
            body["error"]["param"] = param.into();
        }
        if anthropic {
            body["type"] = "error".into();
        }
        body.to_string()
    }
}

impl From<BadBody> for NodeError {
    fn from(bad: BadBody) -> Self {
        Self { param: bad.param, ..Self::bad_request(bad.message) }
    }
}
