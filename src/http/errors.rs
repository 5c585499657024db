//! Errors of the gateway itself, in the API's own shape. None names an address.

mod shape;

use std::borrow::Cow;
use std::fmt;

use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use actix_web::{HttpResponse, ResponseError};

pub use shape::Dialect;

use super::headers;
use crate::actors::api::Refusal;
use crate::prompt::BadBody;

/// An answer that tells what went wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// Its status.
    pub status: StatusCode,
    /// Machine-readable, stable.
    pub code: &'static str,
    /// For people.
    pub message: String,
    /// The field at fault.
    pub param: Option<Cow<'static, str>>,
    /// `Retry-After` in seconds; every 429 and 503 has one.
    pub retry_after: Option<u32>,
    /// Whose words it is told in.
    pub dialect: Dialect,
}

impl ApiError {
    /// An error without a field.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let retry = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        let retry_after = retry.then_some(1);
        Self { status, code, message: message.into(), param: None, retry_after, dialect: Dialect::OpenAi }
    }

    /// The same, told in another API's words.
    pub fn spoken(self, dialect: Dialect) -> Self {
        Self { dialect, ..self }
    }

    /// 400: the body cannot be routed.
    pub fn bad_body(message: impl Into<String>, param: Option<Cow<'static, str>>) -> Self {
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_request", message) }
    }

    /// 404 for a model no worker serves.
    pub fn model_not_found(model: &str) -> Self {
        // A client's text may be long; the message need not be.
        let shown: String = model.chars().take(100).collect();
        let message = format!("The model `{shown}` does not exist.");
        Self {
            param: Some(Cow::Borrowed("model")),
            ..Self::new(StatusCode::NOT_FOUND, "model_not_found", message)
        }
    }

    pub(super) fn body_too_large(limit_mib: usize) -> Self {
        let message = format!("The request body is larger than {limit_mib} MiB.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
    }

    pub(super) fn encoded_body() -> Self {
        let message = "The request body must not be compressed (Content-Encoding).";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message)
    }

    pub(super) fn body_timeout() -> Self {
        let message = "The request body did not arrive in time.";
        Self::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message)
    }

    pub(super) fn body_malformed() -> Self {
        let message = "The request body's chunks are malformed.";
        Self::new(StatusCode::BAD_REQUEST, "invalid_body", message)
    }

    pub(super) fn body_incomplete() -> Self {
        let message = "The request body ended early.";
        Self::new(StatusCode::BAD_REQUEST, CLIENT_GONE, message)
    }

    pub(super) fn overloaded() -> Self {
        let message = "Too many requests are being served. Try again shortly.";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", message)
    }

    /// 401; `shown`: there was a key, a wrong one.
    pub(crate) fn no_key(shown: bool) -> Self {
        let message = match shown {
            true => "This API key is not known here.",
            false => "An API key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        };
        Self::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// 403: whoever asks may use the API, but not this.
    pub(super) fn no_admin() -> Self {
        let message =
            "This needs an API key with `admin` (http.keys), or a listener of its own (http.admin_listen).";
        Self::new(StatusCode::FORBIDDEN, "admin_only", message)
    }

    pub(super) fn key_busy() -> Self {
        let message = "Too many requests of this API key are being served.";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "key_busy", message)
    }

    /// `wait`: seconds until there is room for one more.
    pub(super) fn key_rate(wait: u32) -> Self {
        let message = "This API key has used up its requests of the minute.";
        Self { retry_after: Some(wait), ..Self::new(StatusCode::TOO_MANY_REQUESTS, "key_rate", message) }
    }

    pub(super) fn busy() -> Self {
        let message = "All workers are busy. Try again shortly.";
        Self::new(StatusCode::TOO_MANY_REQUESTS, "workers_busy", message)
    }

    pub(super) fn worker_died() -> Self {
        let message = "A worker failed before it could answer.";
        Self::new(StatusCode::BAD_GATEWAY, WORKER_DIED, message)
    }

    /// For an answer that has begun.
    pub(super) fn broken_off(code: &'static str) -> Self {
        let message = "The worker failed in the middle of its answer.";
        Self::new(StatusCode::BAD_GATEWAY, code, message)
    }

    pub(super) fn no_workers() -> Self {
        let message = "No decode worker can be reached.";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_workers", message)
    }

    pub(super) fn worker_silent() -> Self {
        let message = "No worker answered in time.";
        Self::new(StatusCode::GATEWAY_TIMEOUT, WORKER_SILENT, message)
    }

    /// 426: what Codex must hear to go on over HTTP at once; any other answer costs it seconds.
    pub(super) fn no_web_socket() -> Self {
        let message = "WebSockets are not served here; use HTTP.";
        Self::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message)
    }

    pub(super) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", "There is nothing at this path.")
    }

    pub(super) fn no_worker(name: &str) -> Self {
        let shown: String = name.chars().take(100).collect();
        let message = format!("There is no worker `{shown}`.");
        Self::new(StatusCode::NOT_FOUND, "worker_not_found", message)
    }

    pub(super) fn wrong_method() -> Self {
        let message = "This path does not take this method.";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// Whether it says that there is no room now, as opposed to a fault.
    pub(super) fn is_rejection(&self) -> bool {
        self.retry_after.is_some() || self.status == StatusCode::PAYLOAD_TOO_LARGE
    }
}

/// `code` of an upstream that died.
pub(super) const WORKER_DIED: &str = "worker_died";
/// `code` of an upstream that stayed silent.
pub(super) const WORKER_SILENT: &str = "worker_timeout";
/// Reason of a request whose client left.
pub(super) const CLIENT_GONE: &str = "client_gone";

impl From<BadBody> for ApiError {
    fn from(bad: BadBody) -> Self {
        Self::bad_body(bad.message, bad.param)
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        let error = Self::new(status, refusal.code, refusal.message);
        Self { retry_after: refusal.retry_after.or(error.retry_after), ..error }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status);
        if let Some(seconds) = self.retry_after {
            response.insert_header((RETRY_AFTER, seconds));
        }
        let mode = if self.is_rejection() { "rejected" } else { "failed" };
        if self.status == StatusCode::UNAUTHORIZED {
            response.insert_header((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")));
        }
        response.insert_header((headers::MODE, HeaderValue::from_static(mode)));
        response.insert_header((headers::REASON, HeaderValue::from_static(self.code)));
        response.content_type("application/json").body(self.body())
    }
}
