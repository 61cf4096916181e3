__hutch_busy=1; case $- in *e*) ;; *) __hutch_status "$__hutch_last" ;; esac; \builtin eval "$__hutch_command" </dev/null >&251 2>&252 251>&- 252>&- 254>&-
