//! Actors own state and serialise decisions.

pub mod api;
