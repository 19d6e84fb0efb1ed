//! Rust text without its comments and literals, so that a rule about code looks at code alone.

/// The text with comments, strings and characters blanked out; lines and columns stay where they were.
pub fn code_only(text: &str) -> String {
    let mut scan = Scan { rest: text, out: String::with_capacity(text.len()) };
    while let Some(first) = scan.rest.chars().next() {
        if scan.rest.starts_with("//") {
            let end = scan.rest.find('\n').unwrap_or(scan.rest.len());
            scan.blank(end);
        } else if scan.rest.starts_with("/*") {
            scan.blank(block_comment(scan.rest));
        } else if let Some(length) = raw_string(scan.rest).filter(|_| !scan.inside_word()) {
            scan.blank(length);
        } else if first == '"' {
            scan.blank(quoted(scan.rest, '"'));
        } else if let Some(length) = character(scan.rest) {
            scan.blank(length);
        } else {
            scan.keep(first.len_utf8());
        }
    }
    scan.out
}

struct Scan<'a> {
    rest: &'a str,
    out: String,
}

impl Scan<'_> {
    fn keep(&mut self, length: usize) {
        let (taken, rest) = self.rest.split_at(length);
        self.out.push_str(taken);
        self.rest = rest;
    }

    fn blank(&mut self, length: usize) {
        let (taken, rest) = self.rest.split_at(length);
        self.out.extend(taken.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        self.rest = rest;
    }

    /// Whether the last character belongs to a word: the `r` of `for"` opens no raw string.
    fn inside_word(&self) -> bool {
        self.out.ends_with(|c: char| c.is_alphanumeric() || c == '_')
    }
}

/// Length of a block comment, which may hold others.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of `r"…"`, `r#"…"#`, `br"…"`, if the text starts with one.
fn raw_string(text: &str) -> Option<usize> {
    let body = text.strip_prefix('b').unwrap_or(text).strip_prefix('r')?;
    let hashes = body.len() - body.trim_start_matches('#').len();
    let inner = body[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let end = inner.find(&close).map_or(inner.len(), |at| at + close.len());
    Some(text.len() - inner.len() + end)
}

/// Length of a literal between `quote`s, with escapes; the text starts with the quote.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Length of a character literal; `None` for a lifetime.
fn character(text: &str) -> Option<usize> {
    let inner = text.strip_prefix('\'')?;
    let first = inner.chars().next()?;
    if first == '\\' {
        return Some(quoted(text, '\''));
    }
    inner[first.len_utf8()..].starts_with('\'').then_some(first.len_utf8() + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        assert_eq!(code_only(text), expected);
    }

    #[test]
    fn comments_go() {
        check("a // unsafe\nb", "a          \nb");
        check("a /* /*\n */ */ b", "a      \n       b");
    }

    #[test]
    fn literals_go() {
        check(r#"f("a\"b", x)"#, "f(      , x)");
        check(r##"f(r#"a"b"#, x)"##, "f(        , x)");
        check("f('\"', '\\'', b)", "f(   ,     , b)");
    }

    #[test]
    fn lifetimes_stay() {
        check("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)");
    }
}
