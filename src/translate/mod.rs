//! Responses and Messages for engines that only speak chat completions.
//!
//! A request becomes a chat body ([`request`]); an answer's bytes go into a [`Translator`] and come out as the
//! client's API has them. No I/O here, and no state beyond one answer. The same request always becomes the same
//! body, item by item, so a conversation that grows in one API grows in the other.
//!
//! What chat completions cannot say is refused with the field's name. What only the API's own provider could read
//! (signatures, encrypted reasoning, cache marks, Claude's attribution line) is left out. So is its web search where
//! it stands among other tools: an agent offers it with every request, and works without.

mod answer;
mod blocks;
mod chat;
mod fields;
mod messages;
mod responses;
mod sse;
#[cfg(test)]
mod tests;

pub use answer::{Broken, Translator};

use crate::prompt::{Api, BadBody};

/// A request in chat's words.
#[derive(Debug)]
pub struct Translated {
    /// The body for `/v1/chat/completions`.
    pub body: Vec<u8>,
    /// Types of the tools that were left out.
    pub dropped: Vec<String>,
    /// What its answer needs to know of the request.
    pub answer: Translator,
}

/// Translates a request body; `None` for the APIs that need no translation.
///
/// # Errors
/// [`BadBody`] names the field that is malformed or that chat completions have no words for.
pub fn request(api: Api, body: &[u8]) -> Result<Option<Translated>, BadBody> {
    match api {
        Api::Chat | Api::Completions => Ok(None),
        Api::Responses => responses::request(body).map(Some),
        Api::Messages => messages::request(body).map(Some),
    }
}

/// An engine's error body in the words of `api`; `status` is the HTTP status it came with.
pub fn error(api: Api, status: u16, body: &[u8]) -> Option<Vec<u8>> {
    match api {
        Api::Messages => Some(messages::error(status, body)),
        // The Responses API has the errors of chat completions.
        _ => None,
    }
}
