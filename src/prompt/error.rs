//! What is wrong with a body, in words a client can act on.

use std::borrow::Cow;

/// A body that cannot be routed: the gateway answers 400 with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BadBody {
    /// One sentence for the client.
    pub message: String,
    /// The field at fault, as the API spells it.
    pub param: Option<Cow<'static, str>>,
}

impl BadBody {
    pub(crate) fn malformed(at: usize) -> Self {
        Self { message: format!("the request body is not valid JSON (at byte {at})"), param: None }
    }

    pub(crate) fn field(param: &'static str, what: &str) -> Self {
        Self { message: format!("`{param}` {what}"), param: Some(Cow::Borrowed(param)) }
    }
}
