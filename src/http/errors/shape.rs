//! How an error looks in each API, as an answer and as an event of a stream that breaks off.

use actix_web::http::StatusCode;
use serde_json::json;

use super::ApiError;
use crate::prompt::Api;

/// In whose words an error is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error":{message,type,param,code}}`
    OpenAi,
    /// `{"type":"error","error":{type,message}}`
    Anthropic,
}

impl From<Api> for Dialect {
    fn from(api: Api) -> Self {
        if api == Api::Messages { Self::Anthropic } else { Self::OpenAi }
    }
}

impl ApiError {
    /// The body, as JSON.
    pub(in crate::http) fn body(&self) -> String {
        let Self { message, param, code, .. } = self;
        match self.dialect {
            Dialect::OpenAi => {
                let kind = self.openai_type();
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            Dialect::Anthropic => {
                json!({"type": "error", "error": {"type": self.anthropic_type(), "message": message}})
            }
        }
        .to_string()
    }

    /// The last event of a stream that breaks off; `number` is its place where events have one.
    pub(in crate::http) fn event(&self, api: Api, number: u64) -> String {
        match api {
            Api::Chat | Api::Completions => format!("data: {}\n\n", self.body()),
            Api::Messages => format!("event: error\ndata: {}\n\n", self.body()),
            Api::Responses => {
                let Self { message, param, code, .. } = self;
                let event = json!({"type": "error", "sequence_number": number, "code": code,
                    "message": message, "param": param});
                format!("event: error\ndata: {event}\n\n")
            }
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }
}
