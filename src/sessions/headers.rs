//! Request headers, borrowed: names in lower case, in the order they came.

use super::id::valid;

/// The headers of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Headers<'a>(pub &'a [(&'a str, &'a [u8])]);

impl<'a> Headers<'a> {
    /// The value of a header that is text; several values must agree.
    pub fn text(self, name: &str) -> Option<&'a str> {
        self.agreed(name).and_then(|value| std::str::from_utf8(value).ok())
    }

    /// The first value of a header.
    pub fn raw(self, name: &str) -> Option<&'a [u8]> {
        self.0.iter().find(|(n, _)| *n == name).map(|&(_, value)| value)
    }

    /// The value of a header, white space around it apart; `None` when it came several times and not the same.
    pub fn agreed(self, name: &str) -> Option<&'a [u8]> {
        let mut values = self.0.iter().filter(|(n, _)| *n == name).map(|&(_, value)| value.trim_ascii());
        let first = values.next()?;
        values.all(|other| other == first).then_some(first)
    }

    /// The valid id a header holds; several values must agree.
    pub fn id(self, name: &str) -> Option<&'a str> {
        self.text(name).and_then(valid)
    }

    /// Whether any header's name starts so.
    pub fn any_with_prefix(self, prefix: &str) -> bool {
        self.0.iter().any(|(name, _)| name.starts_with(prefix))
    }
}
