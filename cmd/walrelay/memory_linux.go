package main

import (
	"bytes"
	"os"
	"strconv"
	"sync"
	"syscall"
)

// forgetPages gives back the pages of the program file that are mapped. The
// kernel maps sixteen around each one that is touched, so starting and opening a
// session, which touch a little of every package, map nearly the whole file.
// What is needed again is mapped again, from the page cache.
func forgetPages() {
	for _, m := range program() {
		_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, m.from, m.size, syscall.MADV_DONTNEED)
	}
}

type mapping struct{ from, size uintptr }

// program is where the program file is mapped, which stays so.
var program = sync.OnceValue(func() (all []mapping) {
	name, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil
	}
	for line := range bytes.Lines(maps) {
		f := bytes.Fields(line) // proc(5): addresses, permissions, offset, device, inode, path
		if len(f) < 6 || string(f[5]) != name || f[1][1] == 'w' {
			continue // written pages are no longer those of the file
		}
		low, high, _ := bytes.Cut(f[0], []byte("-"))
		from, err1 := strconv.ParseUint(string(low), 16, 64)
		to, err2 := strconv.ParseUint(string(high), 16, 64)
		if err1 == nil && err2 == nil {
			all = append(all, mapping{uintptr(from), uintptr(to - from)})
		}
	}
	return all
})
