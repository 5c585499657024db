//! Finds a few scalars in JSON that arrives in pieces. It observes, it does not validate: broken JSON yields
//! nothing useful and does no harm.

/// Longest scalar that is kept, in bytes.
const TEXT_MAX: usize = 256;
/// Deepest level at which anything is looked for.
const DEPTH: usize = 8;

/// A step of a path: a key that matters, or an element of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Id,
    Usage,
    PromptTokens,
    CompletionTokens,
    PromptDetails,
    Cached,
    Choices,
    /// `conversation` of a response.
    Conversation,
    Finish,
    /// `message` or, in a stream, `delta`.
    Message,
    ToolCalls,
    Error,
    /// `content` of a message (Messages).
    Content,
    /// `content_block` of an event (Messages).
    Block,
    StopReason,
    Creation,
    CacheRead,
    /// `response` of an event (Responses).
    Response,
    /// `output` of a response.
    Output,
    /// `item` of an event (Responses).
    OutputItem,
    CallId,
    Type,
    Status,
    Sequence,
    Item,
    Other,
}

impl Key {
    fn of(name: &[u8]) -> Self {
        match name {
            b"id" => Self::Id,
            b"usage" => Self::Usage,
            b"prompt_tokens" | b"input_tokens" => Self::PromptTokens,
            b"completion_tokens" | b"output_tokens" => Self::CompletionTokens,
            b"prompt_tokens_details" | b"input_tokens_details" => Self::PromptDetails,
            b"cached_tokens" => Self::Cached,
            b"choices" => Self::Choices,
            b"conversation" => Self::Conversation,
            b"finish_reason" => Self::Finish,
            b"message" | b"delta" => Self::Message,
            b"tool_calls" => Self::ToolCalls,
            b"error" => Self::Error,
            b"content" => Self::Content,
            b"content_block" => Self::Block,
            b"stop_reason" => Self::StopReason,
            b"cache_creation_input_tokens" => Self::Creation,
            b"cache_read_input_tokens" => Self::CacheRead,
            b"response" => Self::Response,
            b"output" => Self::Output,
            b"item" => Self::OutputItem,
            b"call_id" => Self::CallId,
            b"type" => Self::Type,
            b"status" => Self::Status,
            b"sequence_number" => Self::Sequence,
            _ => Self::Other,
        }
    }

    /// Whether a scalar under this key can matter.
    fn is_leaf(self) -> bool {
        use Key::{
            CacheRead, Cached, CallId, CompletionTokens, Creation, Finish, Id, PromptTokens, Sequence,
            Status, StopReason, Type,
        };
        let counted =
            matches!(self, PromptTokens | CompletionTokens | Cached | Creation | CacheRead | Sequence);
        counted || matches!(self, Id | CallId | Finish | StopReason | Type | Status)
    }
}

/// Something found.
#[derive(Debug)]
pub(super) enum Seen<'a> {
    /// A string's content or a number at a path. `null` and booleans are not reported.
    Scalar(&'a [Key], &'a str),
    /// An object begins at a path.
    Object(&'a [Key]),
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between tokens.
    #[default]
    Idle,
    /// In a string.
    Text,
    /// In a string, behind a backslash.
    Escape,
    /// In a number or a word.
    Bare,
}

/// The scanner. Its memory is constant.
#[derive(Debug, Default)]
pub(super) struct JsonScan {
    state: State,
    /// The path's keys down to `DEPTH`; an array's is `Item`.
    path: [Option<Key>; DEPTH],
    /// Open containers.
    depth: usize,
    /// Whether the next string is a key.
    expect_key: bool,
    /// The token being read, when it can matter.
    text: Vec<u8>,
    keep: bool,
}

impl JsonScan {
    /// Forgets everything but its buffer.
    pub(super) fn reset(&mut self) {
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        *self = Self { text, ..Self::default() };
    }

    /// Takes the next bytes.
    pub(super) fn feed(&mut self, bytes: &[u8], mut found: impl FnMut(Seen<'_>)) {
        let mut rest = bytes;
        while let [byte, tail @ ..] = rest {
            match self.state {
                State::Idle => self.token(*byte, &mut found),
                State::Bare if is_bare(*byte) => self.push(&[*byte]),
                State::Bare => {
                    self.bare_end(&mut found);
                    self.token(*byte, &mut found);
                }
                State::Escape => {
                    self.push(&[*byte]);
                    self.state = State::Text;
                }
                State::Text => {
                    let end = memchr::memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
                    self.push(&rest[..end]);
                    let Some(stop) = rest.get(end) else { return };
                    if *stop == b'"' {
                        self.text_end(&mut found);
                    } else {
                        self.push(b"\\");
                        self.state = State::Escape;
                    }
                    rest = &rest[end + 1..];
                    continue;
                }
            }
            rest = tail;
        }
    }

    fn token(&mut self, byte: u8, found: &mut impl FnMut(Seen<'_>)) {
        match byte {
            b'"' => {
                self.state = State::Text;
                self.start(self.expect_key || self.leaf());
            }
            b'{' => {
                found(Seen::Object(&self.keys().0[..self.keys().1]));
                self.open(None);
            }
            b'[' => self.open(Some(Key::Item)),
            b'}' | b']' => self.close(),
            b',' => self.expect_key = self.in_object(),
            b':' | b' ' | b'\t' | b'\n' | b'\r' => {}
            _ => {
                self.state = State::Bare;
                self.start(self.leaf());
                self.push(&[byte]);
            }
        }
    }

    fn start(&mut self, keep: bool) {
        self.text.clear();
        self.keep = keep && self.depth <= DEPTH;
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.keep {
            self.text.extend_from_slice(bytes);
            self.keep = self.text.len() <= TEXT_MAX;
        }
    }

    fn open(&mut self, key: Option<Key>) {
        if let Some(slot) = self.path.get_mut(self.depth) {
            *slot = key;
        }
        self.depth += 1;
        self.expect_key = key.is_none();
    }

    fn close(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        self.expect_key = false;
    }

    fn in_object(&self) -> bool {
        let top = self.depth.checked_sub(1).and_then(|top| self.path.get(top));
        top.is_some_and(|key| *key != Some(Key::Item))
    }

    fn leaf(&self) -> bool {
        let top = self.depth.checked_sub(1).and_then(|top| self.path.get(top).copied().flatten());
        top.is_some_and(Key::is_leaf)
    }

    fn text_end(&mut self, found: &mut impl FnMut(Seen<'_>)) {
        self.state = State::Idle;
        if self.expect_key {
            self.expect_key = false;
            let key = if self.keep { Key::of(&self.text) } else { Key::Other };
            if let Some(slot) = self.depth.checked_sub(1).and_then(|top| self.path.get_mut(top)) {
                *slot = Some(key);
            }
        } else if self.keep {
            self.report(found);
        }
    }

    fn bare_end(&mut self, found: &mut impl FnMut(Seen<'_>)) {
        self.state = State::Idle;
        if self.keep && !matches!(self.text.as_slice(), b"null" | b"true" | b"false") {
            self.report(found);
        }
    }

    fn report(&self, found: &mut impl FnMut(Seen<'_>)) {
        let (keys, len) = self.keys();
        if self.text.contains(&b'\\') {
            let quoted = [b"\"", self.text.as_slice(), b"\""].concat();
            if let Ok(text) = serde_json::from_slice::<String>(&quoted) {
                found(Seen::Scalar(&keys[..len], &text));
            }
        } else if let Ok(text) = std::str::from_utf8(&self.text) {
            found(Seen::Scalar(&keys[..len], text));
        }
    }

    /// The path as keys; of a place deeper than `DEPTH`, nothing that matches.
    fn keys(&self) -> ([Key; DEPTH], usize) {
        (self.path.map(|key| key.unwrap_or(Key::Other)), self.depth.min(DEPTH))
    }
}

fn is_bare(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')
}
