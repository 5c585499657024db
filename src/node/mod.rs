//! The worker side: a node that holds KV, admits turns, moves KV and answers.
//!
//! [`beside`] is a node for an engine that is none itself.
//! [`Node::start`] runs one in this process. [`builtin`] is its reference engine, [`transfer`] moves KV between
//! nodes, [`d2p`] moves it back, [`http`] is what gateways and people talk to; `docs/wire.md` describes the protocol.

pub mod beside;
pub mod builtin;
pub mod config;
pub mod d2p;
pub mod error;
pub mod http;
pub mod transfer;

mod run;

pub use builtin::cost::Clock;
pub use builtin::model::Model;
pub use builtin::reference::{reference_text, reference_text_with};
pub use config::{Limits, NodeConfig};
pub use run::{Node, StartError, until_told_to_stop};
