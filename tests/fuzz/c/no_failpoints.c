/* no_failpoints.c: for targets that do nothing at the core's failpoints. */
void failpoint(const char *name);
void failpoint(const char *name) {
    (void)name;
}
