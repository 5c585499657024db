//! The canonical prompt of a request: what the gateway and the builtin worker both hash.
//!
//! A body is read once, borrowed; tools, system and messages become *items* of canonical bytes, and those a chain
//! of block hashes ([`read()`]). A worker that answers a prompt with text `T` will see
//! `canonical(prompt) ++ assistant_header(api) ++ T` again as the beginning of the next prompt, when the client
//! echoes the answer.

mod api;
mod canonical;
mod chain;
mod content;
mod error;
mod fields;
mod ids;
mod item;
mod json;
mod known;
mod layout;
mod members;
mod neutral;
mod parsed;
mod read;
mod scan;
mod strip;
#[cfg(test)]
mod tests;

pub use api::{Api, is_count_tokens};
pub use canonical::{ItemKind, MEDIA_BYTES, MEDIA_TOKENS};
pub use chain::{BLOCK_BYTES, BLOCK_TOKENS, BYTES_PER_TOKEN, ChainState, chain};
pub use error::BadBody;
pub use fields::{BodyIds, Fields};
pub use ids::call_id;
pub use known::{Known, Mark, Prefixes};
pub use layout::{Item, Layout};
pub use members::{members, rewrite};
pub use parsed::Prompt;
pub use read::{canonical, read};
pub use strip::Strip;

pub(crate) use json::member;
pub(crate) use strip::ATTRIBUTION;

use canonical::{END, Writer};
use json::Cursor;

/// The canonical bytes between a prompt and the text that answers it.
pub const fn assistant_header(api: Api) -> &'static [u8] {
    match api {
        Api::Completions => b"",
        Api::Chat | Api::Responses | Api::Messages => b"\xFEassistant\n",
    }
}

/// The canonical bytes that end an answer's item once the client echoes it.
pub const fn assistant_end(api: Api) -> &'static [u8] {
    match api {
        Api::Completions => b"",
        Api::Chat | Api::Responses | Api::Messages => &[END],
    }
}

/// The canonical bytes of an assistant's message as the client will echo it, tool calls and all: one message, or
/// an array of them (output items of the Responses API).
///
/// # Errors
/// [`BadBody`] when `message` is not such JSON.
pub fn render_assistant(api: Api, message: &[u8]) -> Result<Vec<u8>, BadBody> {
    let (mut w, mut cursor) = (Writer::default(), Cursor::new(message));
    if cursor.peek() == Some(b'[') {
        let mut first = true;
        cursor.array()?;
        while cursor.element(&mut first)? {
            item::item(&mut w, &mut cursor, api, "messages")?;
        }
    } else {
        item::item(&mut w, &mut cursor, api, "messages")?;
    }
    cursor.end()?;
    Ok(w.buf)
}
