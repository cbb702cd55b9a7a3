#include "interpose.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace offload {
namespace {

constexpr size_t kMinBytes = size_t{128} << 10;  // what is smaller stays with malloc

// Never destroyed: tensors outlive every static object.
std::atomic<Pool*> pool{nullptr};
size_t max_bytes = 0;  // what is larger than the machine's memory, the system is to refuse

int PoolMemalign(void** pointer, size_t alignment, size_t nbytes) {
  if (nbytes >= kMinBytes && nbytes <= max_bytes && alignment <= kPageBytes) {
    if (void* const taken = pool.load()->Allocate(nbytes)) {
      *pointer = taken;
      return 0;
    }
  }
  return posix_memalign(pointer, alignment, nbytes);
}

void PoolFree(void* pointer) {
  if (!pool.load()->Owns(pointer)) return std::free(pointer);
  const int error = errno;  // free() leaves it alone, too
  pool.load()->Free(pointer);
  errno = error;
}

// -- the table of imported functions --------------------------------------------------------------

#if defined(__x86_64__)
constexpr bool IsImport(size_t type) {
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64;
}
#elif defined(__aarch64__)
constexpr bool IsImport(size_t type) {
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT || type == R_AARCH64_ABS64;
}
#else
constexpr bool IsImport(size_t) { return false; }
#endif

uintptr_t PageBytes() { return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); }

// A loaded library, seen through its program headers: see elf(5).
class Library {
 public:
  explicit Library(const dl_phdr_info& info) : base_(info.dlpi_addr) {
    for (size_t i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr)& header = info.dlpi_phdr[i];
      if (header.p_type == PT_GNU_RELRO) {
        sealed_begin_ = base_ + header.p_vaddr;
        // The loader seals whole pages: a last one in part stays writable, for what else it holds.
        sealed_end_ = (sealed_begin_ + header.p_memsz) / PageBytes() * PageBytes();
      } else if (header.p_type == PT_DYNAMIC) {
        ReadDynamic(reinterpret_cast<const ElfW(Dyn)*>(base_ + header.p_vaddr));
      }
    }
  }

  // Where its table holds the addresses of the function called `name`.
  std::vector<void**> Imports(std::string_view name) const {
    std::vector<void**> found;
    if (symbols_ == nullptr || strings_ == nullptr) return found;
    for (const auto& table : tables_) {
      for (size_t i = 0; i < table.nbytes / sizeof(ElfW(Rela)); ++i) {
        const ElfW(Rela)& entry = table.entries[i];
        if (!IsImport(ELF64_R_TYPE(entry.r_info)) || entry.r_addend != 0) continue;
        const ElfW(Sym)& symbol = symbols_[ELF64_R_SYM(entry.r_info)];
        if (name != strings_ + symbol.st_name) continue;
        found.push_back(reinterpret_cast<void**>(base_ + entry.r_offset));
      }
    }
    return found;
  }

  // False, and nothing has changed, if the memory cannot be made writable.
  bool Set(void** import, void* function) const {
    const auto address = reinterpret_cast<uintptr_t>(import);
    const bool sealed = address >= sealed_begin_ && address < sealed_end_;
    void* const page = reinterpret_cast<void*>(address / PageBytes() * PageBytes());
    if (sealed && mprotect(page, PageBytes(), PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(import, function, __ATOMIC_RELEASE);
    if (sealed) mprotect(page, PageBytes(), PROT_READ);
    return true;
  }

 private:
  struct Table {
    const ElfW(Rela) * entries;
    size_t nbytes;
  };

  void ReadDynamic(const ElfW(Dyn) * entry) {
    Table imports{nullptr, 0};
    Table others{nullptr, 0};
    for (; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols_ = At<ElfW(Sym)>(entry->d_un.d_ptr);
          break;
        case DT_STRTAB:
          strings_ = At<char>(entry->d_un.d_ptr);
          break;
        case DT_JMPREL:
          imports.entries = At<ElfW(Rela)>(entry->d_un.d_ptr);
          break;
        case DT_PLTRELSZ:
          imports.nbytes = entry->d_un.d_val;
          break;
        case DT_RELA:
          others.entries = At<ElfW(Rela)>(entry->d_un.d_ptr);
          break;
        case DT_RELASZ:
          others.nbytes = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
    for (const Table& table : {imports, others}) {
      if (table.entries != nullptr) tables_.push_back(table);
    }
  }

  // Most loaders have made these absolute, some leave them relative to the base.
  template <typename T>
  const T* At(uintptr_t pointer) const {
    return reinterpret_cast<const T*>(pointer < base_ ? base_ + pointer : pointer);
  }

  uintptr_t base_;
  uintptr_t sealed_begin_ = 0;
  uintptr_t sealed_end_ = 0;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* strings_ = nullptr;
  std::vector<Table> tables_;
};

std::string_view BaseName(std::string_view path) { return path.substr(path.rfind('/') + 1); }

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

std::vector<Library> LoadedTorchAllocators() {
  std::vector<Library> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        if (StartsWith(BaseName(info->dlpi_name), "libc10.so")) {
          static_cast<std::vector<Library>*>(data)->emplace_back(*info);
        }
        return 0;
      },
      &found);
  return found;
}

// Whether `address` is but an entry of the program's own table of imports: where that was not built
// to be moved (Debian's Python), an imported function has that entry's address for everybody.
bool IsImportOfProgram(void* address) {
  Dl_info info{};
  const ElfW(Sym)* symbol = nullptr;
  return dladdr1(address, &info, reinterpret_cast<void**>(const_cast<ElfW(Sym)**>(&symbol)),
                 RTLD_DL_SYMENT) != 0 &&
         symbol != nullptr && symbol->st_shndx == SHN_UNDEF;
}

// The first definition of `function` in the libraries behind the program, in the loader's order.
void* DefinitionOf(const char* function) {
  void* const program = dlopen(nullptr, RTLD_LAZY | RTLD_NOLOAD);
  link_map* library = nullptr;
  void* const into = reinterpret_cast<void*>(&library);
  if (program == nullptr || dlinfo(program, RTLD_DI_LINKMAP, into) != 0) return nullptr;
  void* found = nullptr;
  while (found == nullptr && (library = library->l_next) != nullptr) {
    void* const handle = dlopen(library->l_name, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;                // the kernel's own
    void* const address = dlsym(handle, function);  // of this library, or of one that it needs
    Dl_info info{};
    const bool is_here = address != nullptr && dladdr(address, &info) != 0 &&
                         reinterpret_cast<uintptr_t>(info.dli_fbase) == library->l_addr;
    if (is_here) found = address;
    dlclose(handle);
  }
  dlclose(program);
  return found;
}

size_t MachineBytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

bool AddressesAreLimited() {
  rlimit limit{};
  return getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
}

std::string Install() {
  if (PageBytes() != kPageBytes) {
    // madvise() would round what is given back up to whole pages, into tensors that are alive.
    return "the system's pages are of " + std::to_string(PageBytes()) + " bytes";
  }
  for (const char* function : {"posix_memalign", "free"}) {
    const std::string provider = ProviderOf(function);
    if (!StartsWith(provider, "libc.so") && !StartsWith(provider, "libc-")) {
      return "the process takes its memory from " + provider +
             ", which was put before the C library";
    }
  }
  const std::vector<Library> libraries = LoadedTorchAllocators();
  if (libraries.size() != 1) return "torch's libc10.so is not loaded, or more than once";
  const Library& library = libraries.front();
  const std::vector<void**> takers = library.Imports("posix_memalign");
  const std::vector<void**> givers = library.Imports("free");
  if (takers.empty() || givers.empty()) {
    return "this build of torch does not take its memory from posix_memalign";
  }
  // The pool would take all that others may have.
  if (AddressesAreLimited()) return "the addresses of the process are limited (ulimit -v)";
  max_bytes = MachineBytes();
  pool = Pool::Make(2 * max_bytes).release();
  if (pool.load() == nullptr) return "the system refuses to reserve addresses";
  pthread_atfork([] { pool.load()->BeforeFork(); }, [] { pool.load()->AfterFork(); },
                 [] { pool.load()->AfterForkInChild(); });
  // free first: nothing of the pool may reach the other one.
  for (void** const giver : givers) {
    if (!library.Set(giver, reinterpret_cast<void*>(&PoolFree))) {
      return "the table of torch's imported functions cannot be changed";
    }
  }
  bool taking = false;
  for (void** const taker : takers) {
    taking |= library.Set(taker, reinterpret_cast<void*>(&PoolMemalign));
  }
  return taking ? "" : "the table of torch's imported functions cannot be changed";
}

}  // namespace

std::string ProviderOf(const char* function) {
  void* address = dlsym(RTLD_DEFAULT, function);
  if (address != nullptr && IsImportOfProgram(address)) address = DefinitionOf(function);
  Dl_info info{};
  if (address == nullptr || dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "?";
  return std::string(BaseName(info.dli_fname));
}

std::string UsePoolForTorch() {
  static const std::string reason = Install();
  return reason;
}

Pool* TorchPool() { return pool; }

}  // namespace offload
