# The sources of zlib, as they come with the crate libz-sys, and build files for them.
cp -r /opt/kitchen/crates/zlib/. .
chmod -R u+w .
cat > Makefile <<'M'
CFLAGS = -O2 -Wall -Wextra -DHAVE_UNISTD_H -D_LARGEFILE64_SOURCE=1 -fPIC -fvisibility=hidden
OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))
libz.a: $(OBJECTS)
	ar rcs $@ $^
	ranlib $@
M
cat > CMakeLists.txt <<'M'
cmake_minimum_required(VERSION 3.5)
project(zlib C CXX)
include(CheckTypeSize)
include(CheckFunctionExists)
include(CheckIncludeFile)
include(CheckCSourceCompiles)
check_include_file(sys/types.h HAVE_SYS_TYPES_H)
check_include_file(stdint.h HAVE_STDINT_H)
check_include_file(stddef.h HAVE_STDDEF_H)
check_type_size(off64_t OFF64_T)
check_function_exists(fseeko HAVE_FSEEKO)
check_function_exists(strlcpy_s HAVE_STRLCPY_S)
check_include_file(unistd.h HAVE_UNISTD_H)
file(GLOB sources *.c)
add_library(z STATIC ${sources})
add_library(zshared SHARED ${sources})
target_compile_definitions(z PRIVATE HAVE_UNISTD_H)
target_compile_definitions(zshared PRIVATE HAVE_UNISTD_H)
M
