//! The Responses API.

mod items;
mod request;
mod tools;
mod voice;

pub(super) use request::request;
