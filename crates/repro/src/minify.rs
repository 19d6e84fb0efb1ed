pub struct Minified;
pub fn minify() {}
