//! Which of the client-facing APIs a request speaks.

use std::fmt;

/// The API of a request; the canonical prompt depends on its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages` and `/v1/messages/count_tokens`
    Messages,
}

impl Api {
    /// The API behind a request path; the query and a trailing slash don't matter. `None` for any other path.
    pub fn from_path(path: &str) -> Option<Self> {
        match bare(path) {
            "/v1/chat/completions" => Some(Self::Chat),
            "/v1/completions" => Some(Self::Completions),
            "/v1/responses" => Some(Self::Responses),
            "/v1/messages" | "/v1/messages/count_tokens" => Some(Self::Messages),
            _ => None,
        }
    }

    /// The lower-case name used in metrics and records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
        }
    }
}

impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether the path only counts tokens: such a request is never anybody's turn.
pub fn is_count_tokens(path: &str) -> bool {
    bare(path) == "/v1/messages/count_tokens"
}

fn bare(path: &str) -> &str {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    path.strip_suffix('/').unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        assert_eq!(Api::from_path("/v1/messages?beta=true"), Some(Api::Messages));
        assert_eq!(Api::from_path("/v1/chat/completions/"), Some(Api::Chat));
        assert_eq!(Api::from_path("/v1/completions"), Some(Api::Completions));
        assert_eq!(Api::from_path("/v1/responses"), Some(Api::Responses));
        assert_eq!(Api::from_path("/v1/models"), None);
        assert!(is_count_tokens("/v1/messages/count_tokens?beta=true"));
        assert!(!is_count_tokens("/v1/messages"));
    }
}
