#include <dlfcn.h>
#include <doctest.h>
#include <elf.h>

#include <cstdlib>
#include <string>

#include "interpose.h"

namespace offload {
namespace {

[[maybe_unused]] std::string FileOf(void* address) {
  Dl_info info{};
  return dladdr(address, &info) != 0 ? info.dli_fname : "";
}

// Only in a program that is not built to be moved, which `make plain` makes of this one, and
// without a sanitizer, which puts functions of its own in their place.
#if defined(__x86_64__) && !defined(__PIE__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
TEST_CASE("memory functions are the C library's although the program lends them its addresses") {
  void (*volatile const released)(void*) = &std::free;  // so it has to have an entry for it
  void* const lent = dlsym(RTLD_DEFAULT, "free");
  REQUIRE(lent == reinterpret_cast<void*>(released));
  REQUIRE(FileOf(lent) == FileOf(reinterpret_cast<void*>(&FileOf)));

  CHECK(ProviderOf("free").substr(0, 4) == "libc");
  CHECK(ProviderOf("posix_memalign").substr(0, 4) == "libc");
}
#endif

TEST_CASE("a function that nobody has comes from nowhere") {
  CHECK(ProviderOf("offload_no_such_function") == "?");
}

}  // namespace
}  // namespace offload
