//! KV on the wire between nodes: frames with length and checksum over TCP, a handshake per connection,
//! bounded buffers. `docs/wire.md` describes it.

pub mod frame;
pub mod inbox;
pub mod message;
pub mod receive;
pub mod send;
