pub fn rust_program() {}
